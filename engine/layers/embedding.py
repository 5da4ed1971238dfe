"""Token embedding and the output head, tied or not."""

import structlog
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.ops.backend import Product
from engine.weights.weights import Weights

HEAD = "lm_head.weight"

log = structlog.get_logger()


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


def output_head(weights: Weights, embedding: Embedding, *, tied: bool) -> Product:
    """The product that gives logits: `lm_head.weight`, or the embedding's matrix when `tied`.

    A head that is stored counts, also where the config ties it, as in transformers: some models are
    never tied and yet saved with such a config. One that equals the embeddings is not kept twice.
    """
    if tied and HEAD not in weights:
        return weights.ops.linear(embedding.weight)
    stored = weights.take(HEAD, (embedding.weight.shape[0], embedding.weight.shape[1]))
    if torch.equal(stored, embedding.weight):
        return weights.ops.linear(embedding.weight)
    if tied:
        log.warning(
            "config.json ties this tensor, the file stores another: it is used", tensor=HEAD
        )
    return weights.ops.linear(stored)
