"""A sparse mixture of experts: every token goes through the few MLPs that a router picks."""

import torch
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import ForwardPass
from engine.model_configs.feed_forward import ExpertsConfig, RouterConfig
from engine.model_configs.model_config import ModelConfig
from engine.ops.backend import Router
from engine.weights.weights import Weights


def load_router(config: RouterConfig, weights: Weights, inputs: int) -> Router:
    """The router of `weight`, perhaps with `e_score_correction_bias`."""
    matrix = weights.take("weight", (config.count, inputs), torch.float32)
    correction: Tensor | None = None
    if config.correction_bias:
        correction = weights.take("e_score_correction_bias", (config.count,), torch.float32)
    return weights.ops.router(config, matrix, correction)


class Experts:
    """Tensors `gate.*` of the router and `experts.{gate_up_proj,down_proj}` [experts, out, in].

    Without a gate the first is `up_proj`. They may as well be stored expert by expert, as
    `experts.N.{gate_proj,up_proj,down_proj}.weight`. A latent space has
    `{fc1,fc2}_latent_proj.weight`.
    """

    def __init__(self, config: ExpertsConfig, weights: Weights, model: ModelConfig) -> None:
        hidden, latent = model.hidden_size, config.latent_size
        self.router = load_router(config.router, weights.below("gate"), hidden)
        self.into = self.back = None
        if latent is not None:
            self.into = load_linear(weights, {"fc1_latent_proj": latent}, inputs=hidden)
            self.back = load_linear(weights, {"fc2_latent_proj": hidden}, inputs=latent)
        count, inner, outer = config.router.count, config.intermediate_size, latent or hidden
        up = {"gate_proj": inner, "up_proj": inner} if config.gated else {"up_proj": inner}
        own = weights.below("experts")
        merged = "gate_up_proj" if config.gated else "up_proj"
        self.run = weights.ops.experts(
            _stacked(own, up, merged=merged, experts=count, inputs=outer),
            _stacked(own, {"down_proj": outer}, merged="down_proj", experts=count, inputs=inner),
            activation=config.activation,
            gated=config.gated,
        )

    def __call__(self, x: Tensor, residual: Tensor | None, step: ForwardPass) -> Tensor:
        chosen, shares = self.router(x)
        if self.into is None or self.back is None:
            return self.run(x, chosen, shares, residual)
        return self.back(self.run(self.into(x), chosen, shares), residual)


def _stacked(
    weights: Weights, sizes: dict[str, int], *, merged: str, experts: int, inputs: int
) -> Tensor:
    """Matrices [experts, out, in], the outputs of `sizes` side by side."""
    outputs = sum(sizes.values())
    if merged in weights:
        return weights.take(merged, (experts, outputs, inputs))
    # One expert at a time, into its place: a layer's experts are most of a model.
    shape = (experts, outputs, inputs)
    matrices = torch.empty(shape, dtype=weights.dtype, device=weights.device)
    for expert, matrix in enumerate(matrices):
        parts = matrix.split_with_sizes(list(sizes.values()))
        for (name, size), part in zip(sizes.items(), parts, strict=True):
            weights.take(f"{expert}.{name}.weight", (size, inputs), out=part)
    return matrices
