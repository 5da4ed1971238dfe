"""Gemma 3 text: sliding-window layers with a full-attention layer now and then; norms all around.

Also reads the text part of vision-language checkpoints; vision tower and projector are skipped.
"""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import (
    TORCH_DTYPES,
    AttentionCache,
    AttentionIndex,
    ForwardBatch,
    LayerCaches,
)
from engine.kv_cache.spec import AttentionSpec
from engine.layers.embedding import Embedding, output_head
from engine.layers.mlp import GatedMLP, MLPStyle
from engine.layers.norm import load_norm
from engine.layers.qk_norm_attention import AttentionShape, QKNormAttention
from engine.layers.rotary import Rotary
from engine.layers.weights import Weights
from engine.model_configs.gemma3 import SLIDING, Gemma3Config
from engine.ops.scratch import Scratch

SKIPPED = ("vision_tower.", "multi_modal_projector.")
# All norms store their weight minus one.
NORM_OFFSET = 1.0


def rename(stored_name: str) -> str | None:
    """The name asked for by this file, or None for tensors that are skipped by design.

    Wrapped models are stored as `language_model.model.*` on the hub, and as
    `model.language_model.*` by some versions of transformers.
    """
    if stored_name.removeprefix("model.").startswith(SKIPPED):
        return None
    if stored_name.startswith("model.language_model."):
        return "model." + stored_name.removeprefix("model.language_model.")
    return stored_name.removeprefix("language_model.")


class Gemma3:
    """Built from `model.*` and `lm_head.weight` (names after `rename`)."""

    def __init__(self, config: Gemma3Config, weights: Weights) -> None:
        hidden, dtype = config.hidden_size, TORCH_DTYPES[config.dtype]
        table = weights.take("model.embed_tokens.weight", (config.vocab_size, hidden))
        # transformers rounds this factor to the compute dtype, and models were trained so.
        self.embed = Embedding(table, float(torch.tensor(hidden**0.5, dtype=dtype)))
        scratch = Scratch()
        self.layers = [
            _Layer(config, weights, layer, scratch=scratch) for layer in range(config.num_layers)
        ]
        self.norm = load_norm(
            weights, "model.norm", hidden, eps=config.rms_norm_eps, offset=NORM_OFFSET
        )
        self.lm_head = output_head(weights, self.embed, tied=config.tie_word_embeddings)
        self.local_rotary = Rotary(config.local_rope, dtype, table.device)
        self.global_rotary = Rotary(config.global_rope, dtype, table.device)
        self.softcap = config.logit_softcap

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [T, hidden] after the final norm."""
        x = self.embed(batch.token_ids)
        near, far = self.local_rotary.select(batch), self.global_rotary.select(batch)
        for layer in self.layers:
            cache, index = caches[layer.key], batch.group_index[layer.key[0]]
            assert isinstance(cache, AttentionCache)
            assert isinstance(index, AttentionIndex)
            x = layer(x, near if layer.sliding else far, cache, index=index, batch=batch)
        return self.norm(x)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """[n, hidden] -> float32 [n, vocab]."""
        logits = self.lm_head(hidden_rows).to(torch.float32)
        return logits if self.softcap is None else (logits / self.softcap).tanh() * self.softcap


class _Layer:
    """Attention and MLP, each normed before and after, then added."""

    def __init__(
        self, config: Gemma3Config, weights: Weights, layer: int, *, scratch: Scratch
    ) -> None:
        prefix, hidden = f"model.layers.{layer}", config.hidden_size
        eps = config.rms_norm_eps
        norm = partial(load_norm, weights, size=hidden, eps=eps, offset=NORM_OFFSET)
        self.key = (config.group_of(layer, AttentionSpec), layer)
        self.sliding = config.layer_types[layer] == SLIDING
        self.norm = norm(name=f"{prefix}.input_layernorm")
        self.attention = QKNormAttention(
            _shape(config, self.sliding), weights, f"{prefix}.self_attn", scratch=scratch
        )
        self.attention_norm = norm(name=f"{prefix}.post_attention_layernorm")
        self.mlp_norm = norm(name=f"{prefix}.pre_feedforward_layernorm")
        style = MLPStyle(activation=partial(F.gelu, approximate="tanh"))
        size = config.intermediate_size
        self.mlp = GatedMLP(weights, f"{prefix}.mlp", hidden, size, style=style)
        self.output_norm = norm(name=f"{prefix}.post_feedforward_layernorm")

    def __call__(
        self,
        x: Tensor,
        rotary: Tensor,
        cache: AttentionCache,
        *,
        index: AttentionIndex,
        batch: ForwardBatch,
    ) -> Tensor:
        heads = self.attention.alone(self.norm(x), rotary, cache, index=index, batch=batch)
        x = x + self.attention_norm(heads)
        return x + self.output_norm(self.mlp.alone(self.mlp_norm(x)))


def _shape(config: Gemma3Config, sliding: bool) -> AttentionShape:
    return AttentionShape(
        hidden=config.hidden_size,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        gated=False,
        norm_offset=NORM_OFFSET,
        scale=config.scale,
        window=config.window if sliding else None,
    )
