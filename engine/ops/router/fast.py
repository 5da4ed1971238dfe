"""A router by torch's operators, written as the papers have it: the truth of the native one too."""

import torch
from torch import Tensor

from engine.model_configs.feed_forward import RouterConfig, Scoring


class TorchRouter:
    """See `backend.Router`; matrix [count, in] and correction [count] or None, float32."""

    def __init__(self, config: RouterConfig, matrix: Tensor, correction: Tensor | None) -> None:
        self.config = config
        self._matrix = matrix.t().contiguous()
        self._correction = correction

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
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
