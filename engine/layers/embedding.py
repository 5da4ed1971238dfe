"""Token embedding and the output head, tied or not."""

import torch.nn.functional as F
from torch import Tensor

from engine.layers.linear import Linear
from engine.layers.weights import Weights


class Embedding:
    """weight [vocab, hidden]; also the output head of a model with tied embeddings."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return F.embedding(token_ids, self.weight)


def output_head(weights: Weights, embedding: Embedding, *, tied: bool) -> Linear:
    """The product that gives logits: `lm_head.weight`, or the embedding's matrix when `tied`."""
    if tied:
        weights.skip("lm_head.weight")
        return Linear(embedding.weight)
    vocab, hidden = embedding.weight.shape
    return Linear(weights.take("lm_head.weight", (vocab, hidden)))
