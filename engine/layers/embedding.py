"""Token embedding and the output head, tied or not."""

import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.weights import Weights


class Embedding:
    """weight [vocab, hidden]; also the output head of a model with tied embeddings.

    `scale` multiplies the rows looked up, not the head.
    """

    def __init__(self, weight: Tensor, scale: float = 1.0) -> None:
        self.weight = weight
        self.scale = scale

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        rows = F.embedding(token_ids, self.weight)
        return rows if self.scale == 1.0 else rows.mul_(self.scale)


def output_head(weights: Weights, embedding: Embedding, *, tied: bool) -> Linear:
    """The product that gives logits: `lm_head.weight`, or the embedding's matrix when `tied`."""
    if tied:
        weights.skip("lm_head.weight")
        return Linear(embedding.weight)
    vocab, hidden = embedding.weight.shape
    return Linear(weights.take("lm_head.weight", (vocab, hidden)))
