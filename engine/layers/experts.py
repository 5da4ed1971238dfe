"""A sparse mixture of experts: every token goes through the few MLPs that a router picks."""

import torch
from torch import Tensor

from engine.layers.linear import load_linear
from engine.layers.mixer import ForwardPass
from engine.model_configs.feed_forward import ExpertsConfig, RouterConfig, Scoring
from engine.model_configs.model_config import ModelConfig
from engine.weights.weights import Weights


class Router:
    """Matrix [count, in] and perhaps a correction [count], both float32 as are all scores.

    A rounded score may choose another expert than an unrounded one.
    """

    def __init__(self, config: RouterConfig, matrix: Tensor, correction: Tensor | None) -> None:
        self.config = config
        self._matrix = matrix.t().contiguous()
        self._correction = correction

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, in] -> the experts of each token, int64 [T, k], and their shares, float32."""
        config = self.config
        logits = x.float() @ self._matrix
        is_softmax = config.scoring is Scoring.SOFTMAX
        scores = torch.softmax(logits, dim=-1) if is_softmax else logits.sigmoid_()
        open_to = scores if self._correction is None else scores + self._correction
        if config.groups > 1:
            open_to = self._in_best_groups(open_to)
        chosen = open_to.topk(config.top_k, dim=-1).indices
        shares = scores.gather(1, chosen)
        if config.renormalise:
            shares /= shares.sum(dim=-1, keepdim=True) + config.floor
        return chosen, shares if config.scale == 1.0 else shares.mul_(config.scale)

    def _in_best_groups(self, scores: Tensor) -> Tensor:
        """The scores [T, count], minus infinity outside the token's best groups."""
        by_group = scores.view(len(scores), self.config.groups, -1)
        of_groups = by_group.topk(2, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(self.config.top_groups, dim=-1).indices
        closed = torch.ones_like(of_groups, dtype=torch.bool).scatter_(1, best, False)
        return by_group.masked_fill(closed.unsqueeze(-1), float("-inf")).view_as(scores)


def load_router(config: RouterConfig, weights: Weights, inputs: int) -> Router:
    """The router of `weight`, perhaps with `e_score_correction_bias`."""
    matrix = weights.take("weight", (config.count, inputs), torch.float32)
    correction: Tensor | None = None
    if config.correction_bias:
        correction = weights.take("e_score_correction_bias", (config.count,), torch.float32)
    return Router(config, matrix, correction)


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
