"""Token embedding and the output head, tied or not."""

import structlog
import torch
from torch import Tensor

from engine.model_configs.model_config import HEAD
from engine.ops.backend import Ops, Product
from engine.weights.weights import Weights

TABLE = "model.embed_tokens.weight"

log = structlog.get_logger()


class Embedding:
    """weight [vocab, hidden]; also the output head of a model with tied embeddings.

    `scale` multiplies the rows looked up, not the head; they come in `dtype`.
    """

    def __init__(self, weight: Tensor, scale: float, dtype: torch.dtype, *, ops: Ops) -> None:
        self.weight = weight
        self.scale = scale
        self.dtype = dtype
        self._lookup = ops.lookup

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> [T, hidden]."""
        return self._lookup(self.weight, token_ids, self.dtype, scale=self.scale)


def output_head(weights: Weights, embedding: Embedding, *, tied: bool) -> Product:
    """The product that gives logits: `lm_head.weight`, or the embedding's matrix when `tied`.

    A head that is stored counts, also where the config ties it, as in transformers: some models are
    never tied and yet saved with such a config. One that equals the embeddings is not kept twice.
    """
    if (tied and HEAD not in weights) or weights.holds_twice(HEAD, TABLE):
        return weights.ops.linear(embedding.weight)
    stored = weights.take(HEAD, (embedding.weight.shape[0], embedding.weight.shape[1]))
    if tied:
        log.warning(
            "config.json ties this tensor, the file stores another: it is used", tensor=HEAD
        )
    return weights.ops.linear(stored)
