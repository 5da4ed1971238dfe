"""The model that all families are: embedding, residual blocks, last norm, head.

A family's config says what it is made of (`engine/model_configs/model_config.py`); this builds it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from engine.forward import ForwardBatch, LayerCaches
from engine.kv_cache.spec import LayerSpec
from engine.layers.attention import Attention
from engine.layers.embedding import TABLE, Embedding, output_head
from engine.layers.experts import Experts
from engine.layers.gated_delta_net import GatedDeltaNet
from engine.layers.kimi_delta_attention import KimiDeltaAttention
from engine.layers.latent_attention import LatentAttention
from engine.layers.lightning_attention import LightningAttention
from engine.layers.mamba1 import Mamba1
from engine.layers.mamba2 import Mamba2
from engine.layers.mixer import ForwardPass, MakeFeedForward, MakeMixer, Part, ResidualBlock
from engine.layers.mlp import MLP
from engine.layers.norm import load_norm
from engine.layers.rotary import Rotary
from engine.layers.short_conv import ShortConv
from engine.model_configs.attention import AttentionConfig, LatentAttentionConfig
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig
from engine.model_configs.model_config import Block, FeedForwardConfig, ModelConfig
from engine.model_configs.recurrent import (
    GatedDeltaNetConfig,
    KimiDeltaAttentionConfig,
    LightningAttentionConfig,
    Mamba1Config,
    Mamba2Config,
    ShortConvConfig,
)
from engine.model_configs.rope import RopeConfig
from engine.ops.backend import Norm, Product, Recorder
from engine.weights.weights import Weights

MIXERS: Mapping[type, MakeMixer[Any]] = MappingProxyType(
    {
        AttentionConfig: Attention,
        LatentAttentionConfig: LatentAttention,
        Mamba1Config: Mamba1,
        Mamba2Config: Mamba2,
        GatedDeltaNetConfig: GatedDeltaNet,
        ShortConvConfig: ShortConv,
        LightningAttentionConfig: LightningAttention,
        KimiDeltaAttentionConfig: KimiDeltaAttention,
    }
)
FEED_FORWARD: Mapping[type, MakeFeedForward[Any]] = MappingProxyType(
    {MLPConfig: MLP, ExpertsConfig: Experts}
)


@dataclass(slots=True, frozen=True, kw_only=True)
class HybridModel:
    """Implements `loader.CausalLM`."""

    config: ModelConfig
    embeddings: Embedding
    blocks: Sequence[ResidualBlock]
    norm: Norm
    head: Product
    rotary: Mapping[RopeConfig, Rotary]
    recorder: Recorder | None

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        rotary = {rope: table.select(batch) for rope, table in self.rotary.items()}
        step = ForwardPass(batch, caches, rotary)
        x = self.embeddings(batch.token_ids)
        for block in self.blocks:
            x = block(x, step)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        logits = self.head(hidden_rows).to(torch.float32)
        if self.config.logits_scale != 1.0:
            logits = logits.mul_(self.config.logits_scale)
        cap = self.config.logit_softcap
        return logits if cap is None else (logits / cap).tanh() * cap


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """The model of `config`, from `model.*` and `lm_head.weight`.

    Raises CheckpointError for tensors that are missing or misshapen.
    """
    table = weights.take(TABLE, (config.vocab_size, config.hidden_size))
    scale = config.embedding_scale
    if config.rounds_embedding_scale:
        scale = float(torch.tensor(scale, dtype=weights.dtype))
    residual_dtype = torch.float32 if config.residual_in_fp32 else weights.dtype
    embeddings = Embedding(table, scale, residual_dtype, ops=weights.ops)
    # Layers with equal specs are one KV cache group, so a spec names its group.
    group_of = {group.spec: number for number, group in enumerate(config.groups)}
    blocks = [
        _block(config, block, weights.below(f"model.layers.{layer}"), layer, group_of=group_of)
        for layer, own in enumerate(config.layers)
        for block in own
    ]
    return HybridModel(
        config=config,
        embeddings=embeddings,
        blocks=blocks,
        norm=load_norm(weights, "model.norm", config),
        head=output_head(weights, embeddings, tied=config.tie_word_embeddings),
        recorder=weights.ops.recorder,
        rotary={
            rope: Rotary(rope, weights.dtype, weights.device, ops=weights.ops)
            for rope in _ropes(config)
        },
    )


def _block(
    config: ModelConfig,
    block: Block,
    weights: Weights,
    layer: int,
    *,
    group_of: Mapping[LayerSpec, int],
) -> ResidualBlock:
    """One block, from the tensors below its layer."""
    parts: list[Part] = []
    for name, part in block.parts:
        own = weights.below(name)
        if isinstance(part, FeedForwardConfig):
            parts.append(FEED_FORWARD[type(part)](part, own, config))
        else:
            key = group_of[part.spec(config.dtype)], layer
            parts.append(MIXERS[type(part)](part, own, config, key))
    return ResidualBlock(
        None if block.norm is None else load_norm(weights, block.norm, config),
        parts,
        None if block.post_norm is None else load_norm(weights, block.post_norm, config),
        block.normed_residual,
    )


def _ropes(config: ModelConfig) -> set[RopeConfig]:
    """Every rotary setting that a layer has."""
    attention = (mixer for own in config.mixers for mixer in own)
    ropes = (mixer.rope for mixer in attention if isinstance(mixer, AttentionConfig))
    return {rope for rope in ropes if rope is not None}
