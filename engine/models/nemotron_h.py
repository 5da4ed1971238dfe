"""Nemotron-H (Mamba2, attention and feed-forward layers, one kind each) over shared layers.

Checkpoint names are the hub's (`backbone.*`), which transformers writes too.
"""

from collections.abc import Sequence

from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import ForwardPass, Part, ResidualBlock
from engine.layers.weights import Weights
from engine.model_configs.model_config import MLPConfig, ModelConfig
from engine.models.hybrid import HybridModel, Names, build_hybrid, norm_of

NAMES = Names(
    embeddings="backbone.embeddings",
    layers="backbone.layers",
    norm="backbone.norm_f",
    mixer="mixer",
)


def rename(stored: str) -> str | None:
    """`model.*` (transformers 5 inside) to `backbone.*`; prediction heads are skipped."""
    if stored.startswith("mtp."):
        return None
    return stored.replace("model.", "backbone.", 1) if stored.startswith("model.") else stored


def build(config: ModelConfig, weights: Weights) -> HybridModel:
    """From `backbone.*` and `lm_head.weight`."""
    return build_hybrid(config, weights, _layer, NAMES)


def _layer(config: ModelConfig, weights: Weights, mixers: Sequence[Part]) -> list[ResidualBlock]:
    mlp = () if mixers else [_MLP(config.mlp, weights.below("mixer"), config.hidden_size)]
    return [ResidualBlock(norm_of(config, weights, "norm"), mixers or mlp)]


class _MLP:
    """down(relu(up(x))^2)."""

    def __init__(self, config: MLPConfig, weights: Weights, hidden: int) -> None:
        inner, bias = config.intermediate_size, config.bias
        self.up = load_linear(weights, {"up_proj": inner}, inputs=hidden, bias=bias)
        self.down = load_linear(weights, {"down_proj": hidden}, inputs=inner, bias=bias)

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        return self.down(self.up(x).relu_().square_(), residual)
