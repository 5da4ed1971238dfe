"""Nemotron-H (Mamba2, attention and feed-forward layers, one kind each) over shared layers.

Checkpoint names are the hub's (`backbone.*`), which transformers writes too.
"""

import torch
from torch import Tensor

from engine.forward import ForwardBatch, LayerCaches
from engine.kv_cache.spec import AttentionSpec, MambaSpec
from engine.layers.embedding import Embedding, output_head
from engine.layers.mixers import AttentionMixer, ForwardPass, MambaMixer, Mixer
from engine.layers.norm import RMSNorm
from engine.layers.projection import load_linear
from engine.layers.weights import Weights
from engine.model_configs.nemotron_h import LayerKind, NemotronHConfig
from engine.ops.scratch import Scratch


def rename(stored: str) -> str | None:
    """`model.*` (transformers 5 inside) to `backbone.*`; prediction heads are skipped."""
    if stored.startswith("mtp."):
        return None
    return stored.replace("model.", "backbone.", 1) if stored.startswith("model.") else stored


class NemotronH:
    """Hidden states and logits of a packed batch; keeps K/V and states in `caches`."""

    def __init__(self, config: NemotronHConfig, weights: Weights) -> None:
        hidden = config.hidden_size
        self.dtype = weights.dtype
        self.residual_dtype = torch.float32 if config.residual_in_fp32 else weights.dtype
        self.embeddings = Embedding(
            weights.take("backbone.embeddings.weight", (config.vocab_size, hidden))
        )
        scratch = Scratch()
        self.layers = [
            _Layer(config, weights, index, scratch=scratch) for index in range(config.num_layers)
        ]
        self.norm = RMSNorm(weights.take("backbone.norm_f.weight", (hidden,)), config.rms_norm_eps)
        self.head = output_head(weights, self.embeddings, tied=config.tie_word_embeddings)

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        """Hidden states [T, hidden] after the last norm."""
        step = ForwardPass(batch, caches, None)
        hidden = self.embeddings(batch.token_ids).to(self.residual_dtype)
        for layer in self.layers:
            hidden = layer(hidden, step)
        return self.norm(hidden).to(self.dtype)

    def logits(self, hidden_rows: Tensor) -> Tensor:
        """float32 logits [rows, vocab] of some rows of hidden states."""
        return self.head(hidden_rows).float()


class _Layer:
    """residual + mixer(norm(residual))."""

    def __init__(
        self, config: NemotronHConfig, weights: Weights, index: int, *, scratch: Scratch
    ) -> None:
        prefix = f"backbone.layers.{index}"
        eps = config.rms_norm_eps
        self.norm = RMSNorm(weights.take(f"{prefix}.norm.weight", (config.hidden_size,)), eps)
        self.mixer = _mixer(config, weights, index, scratch=scratch)
        self.dtype = weights.dtype

    def __call__(self, residual: Tensor, step: ForwardPass) -> Tensor:
        x = self.norm(residual).to(self.dtype)
        if residual.dtype == x.dtype:
            return self.mixer(x, residual, step)
        return residual + self.mixer(x, torch.zeros_like(x), step)


class _MlpMixer:
    """down(relu(up(x))^2)."""

    def __init__(self, config: NemotronHConfig, weights: Weights, prefix: str) -> None:
        inner, hidden, bias = config.intermediate_size, config.hidden_size, config.mlp_bias
        self.up = load_linear(weights, prefix, {"up_proj": inner}, inputs=hidden, bias=bias)
        self.down = load_linear(weights, prefix, {"down_proj": hidden}, inputs=inner, bias=bias)

    def __call__(self, x: Tensor, residual: Tensor, step: ForwardPass) -> Tensor:
        return self.down.add_to(residual, self.up(x).relu_().square_())


def _mixer(config: NemotronHConfig, weights: Weights, index: int, *, scratch: Scratch) -> Mixer:
    prefix, hidden = f"backbone.layers.{index}.mixer", config.hidden_size
    match config.layer_kinds[index]:
        case LayerKind.MAMBA:
            key = (config.group_of(index, MambaSpec), index)
            eps = config.rms_norm_eps
            return MambaMixer(config.mamba, weights, prefix, key=key, hidden=hidden, eps=eps)
        case LayerKind.ATTENTION:
            key = (config.group_of(index, AttentionSpec), index)
            return AttentionMixer(
                config.attention, weights, prefix, key=key, hidden=hidden, scratch=scratch
            )
        case LayerKind.MLP:
            return _MlpMixer(config, weights, prefix)
