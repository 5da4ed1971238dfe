"""The model that all families are: embedding, residual blocks, last norm, head.

A family says how its tensors are named and which blocks make up a layer; which mixers a layer has
is its config's business.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.forward import ForwardBatch, LayerCaches
from engine.layers.attention import Attention
from engine.layers.embedding import Embedding, output_head
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.linear import Linear
from engine.layers.mamba2 import Mamba2
from engine.layers.mixer import CacheKey, ForwardPass, Part, ResidualBlock
from engine.layers.norm import RMSNorm, load_norm
from engine.layers.rotary import Rotary
from engine.layers.weights import Weights
from engine.model_configs.mixers import AttentionConfig, Mamba2Config, RopeConfig
from engine.model_configs.model_config import MixerConfig, ModelConfig

MakeLayer = Callable[[ModelConfig, Weights, Sequence[Part]], list[ResidualBlock]]
"""The blocks of one layer, from the weights below its name and its mixers."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Names:
    """Names of the tensors that all models have; `mixer`: one name for mixers of any kind."""

    embeddings: str = "model.embed_tokens"
    layers: str = "model.layers"
    norm: str = "model.norm"
    mixer: str | None = None


@dataclass(slots=True, frozen=True, kw_only=True)
class HybridModel:
    """Implements `registry.CausalLM`. `dtype`: of the residual between blocks."""

    config: ModelConfig
    embeddings: Embedding
    dtype: torch.dtype
    blocks: Sequence[ResidualBlock]
    norm: RMSNorm
    head: Linear
    rotary: Mapping[RopeConfig, Rotary]

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        rotary = {rope: table.select(batch) for rope, table in self.rotary.items()}
        step = ForwardPass(batch, caches, rotary)
        x = self.embeddings(batch.token_ids).to(self.dtype)
        for block in self.blocks:
            x = block(x, step)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        logits = self.head(hidden_rows).to(torch.float32)
        if self.config.logits_scale != 1.0:
            logits = logits.mul_(self.config.logits_scale)
        cap = self.config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


def build_hybrid(
    config: ModelConfig, weights: Weights, make_layer: MakeLayer, names: Names = Names()
) -> HybridModel:
    """The model of `config`, with the layers that `make_layer` builds.

    Raises CheckpointError for tensors that are missing or misshapen.
    """
    table = weights.take(f"{names.embeddings}.weight", (config.vocab_size, config.hidden_size))
    embeddings = Embedding(table, config.embedding_scale)
    # Layers with equal specs are one KV cache group, so a spec names its group.
    group_of = {group.spec: number for number, group in enumerate(config.groups)}
    blocks: list[ResidualBlock] = []
    for layer, configs in enumerate(config.mixers):
        own = weights.below(f"{names.layers}.{layer}")
        mixers = [
            _mixer(config, mixer, own, (group_of[mixer.spec(config.dtype)], layer), names.mixer)
            for mixer in configs
        ]
        blocks += make_layer(config, own, mixers)
    return HybridModel(
        config=config,
        embeddings=embeddings,
        dtype=torch.float32 if config.residual_in_fp32 else weights.dtype,
        blocks=blocks,
        norm=norm_of(config, weights, names.norm),
        head=output_head(weights, embeddings, tied=config.tie_word_embeddings),
        rotary={rope: Rotary(rope, weights.dtype, weights.device) for rope in _ropes(config)},
    )


def norm_of(config: ModelConfig, weights: Weights, name: str) -> RMSNorm:
    """A norm over the hidden channels."""
    offset = config.norm_offset
    return load_norm(weights, name, config.hidden_size, eps=config.rms_norm_eps, offset=offset)


def _mixer(
    model: ModelConfig, config: MixerConfig, weights: Weights, key: CacheKey, name: str | None
) -> Part:
    hidden, eps = model.hidden_size, model.rms_norm_eps
    match config:
        case AttentionConfig():
            own, offset = weights.below(name or "self_attn"), model.norm_offset
            return Attention(config, own, key, hidden=hidden, eps=eps, norm_offset=offset)
        case Mamba2Config():
            return Mamba2(config, weights.below(name or "mamba"), key, hidden=hidden, eps=eps)
        case _:
            own = weights.below(name or "linear_attn")
            return GatedDeltaNet(config, own, key, hidden=hidden, eps=eps)


def _ropes(config: ModelConfig) -> set[RopeConfig]:
    """Every rotary setting that a layer has."""
    attention = (mixer for own in config.mixers for mixer in own)
    ropes = (mixer.rope for mixer in attention if isinstance(mixer, AttentionConfig))
    return {rope for rope in ropes if rope is not None}
