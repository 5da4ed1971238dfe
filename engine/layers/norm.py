"""Root-mean-square norms of a model. Weights that a family stores minus one are corrected here."""

from engine.model_configs.model_config import ModelConfig
from engine.ops.backend import Norm
from engine.weights.weights import Weights


def load_norm(weights: Weights, name: str, model: ModelConfig) -> Norm:
    """The norm `<name>.weight` over the hidden channels."""
    weight = weights.take(f"{name}.weight", (model.hidden_size,)).float() + model.norm_offset
    return weights.ops.norm(weight, model.rms_norm_eps, weights.dtype)
