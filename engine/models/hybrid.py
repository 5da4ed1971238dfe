"""The model around hybrid layers: embedding, layers, last norm, head. Families say what is inside.

Mixers are `model.layers.<i>.{mamba,self_attn}`; which of them a layer has follows from what it
keeps in the cache.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.forward import TORCH_DTYPES, ForwardBatch, LayerCaches
from engine.kv_cache.spec import AttentionSpec, LayerSpec, MambaSpec
from engine.layers.embedding import Embedding, output_head
from engine.layers.hybrid_layer import HybridLayer
from engine.layers.linear import Linear
from engine.layers.mixers import AttentionMixer, ForwardPass, MambaMixer, Mixer
from engine.layers.norm import RMSNorm, load_norm
from engine.layers.rotary import Rotary
from engine.layers.weights import Weights
from engine.model_configs.hybrid import HybridConfig
from engine.ops.scratch import Scratch

MakeLayer = Callable[[int, list[Mixer]], HybridLayer]


@dataclass(slots=True, frozen=True, kw_only=True)
class HybridModel:
    """`rotary` None: no layer has positions. Logits are multiplied by `logits_scale`."""

    embed: Embedding
    layers: Sequence[HybridLayer]
    norm: RMSNorm
    lm_head: Linear
    rotary: Rotary | None
    logits_scale: float

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [T, hidden] after the last norm; keeps K/V and states in `caches`."""
        rotary = None if self.rotary is None else self.rotary.select(batch)
        step = ForwardPass(batch, caches, rotary)
        x = self.embed(batch.token_ids)
        for layer in self.layers:
            x = layer(x, step)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        logits = self.lm_head(hidden_rows).to(torch.float32)
        return logits if self.logits_scale == 1.0 else logits.mul_(self.logits_scale)


def build_hybrid(
    config: HybridConfig, weights: Weights, make_layer: MakeLayer, *, last_norm: str
) -> HybridModel:
    """The model of layers from `make_layer`, which is given an index and that layer's mixers."""
    hidden = config.hidden_size
    table = weights.take("model.embed_tokens.weight", (config.vocab_size, hidden))
    embed = Embedding(table, config.embedding_scale)
    scratch, rope = Scratch(), config.attention.rope
    return HybridModel(
        embed=embed,
        layers=[
            make_layer(
                layer,
                [_mixer(config, weights, layer, spec=spec, scratch=scratch) for spec in specs],
            )
            for layer, specs in enumerate(config.layer_specs)
        ],
        norm=load_norm(weights, last_norm, hidden, eps=config.rms_norm_eps),
        lm_head=output_head(weights, embed, tied=config.tie_word_embeddings),
        rotary=None if rope is None else Rotary(rope, TORCH_DTYPES[config.dtype], weights.device),
        logits_scale=config.logits_scale,
    )


def _mixer(
    config: HybridConfig, weights: Weights, layer: int, *, spec: LayerSpec, scratch: Scratch
) -> Mixer:
    prefix, hidden = f"model.layers.{layer}", config.hidden_size
    if isinstance(spec, MambaSpec):
        assert config.mamba is not None
        return MambaMixer(
            config.mamba,
            weights,
            f"{prefix}.mamba",
            key=(config.group_of(layer, MambaSpec), layer),
            hidden=hidden,
            eps=config.rms_norm_eps,
        )
    return AttentionMixer(
        config.attention,
        weights,
        f"{prefix}.self_attn",
        key=(config.group_of(layer, AttentionSpec), layer),
        hidden=hidden,
        scratch=scratch,
    )
