"""A mixture of experts as two grouped products over rows that are sorted by expert.

    slots (token, choice)   t0:e2 t0:e0 t1:e2 t1:e1
    sorted by expert        t0:e0 | t1:e1 | t0:e2 t1:e2
    ends of the experts     1       2       4

The ends stay on the device: the host never waits for what the router chose.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.ops.activation.fast import make_activation

ALIGNMENT = 16
"""Bytes: `torch._grouped_mm` takes no rows whose distance is not a multiple of it."""


class TorchExperts:
    """See `backend.Mixture`."""

    def __init__(self, up: Tensor, down: Tensor, *, activation: Activation, gated: bool) -> None:
        # Inputs first: a grouped product on a CPU reads them so up to 1.5 times faster in bfloat16.
        self._up, self._down = up.mT.contiguous(), down.mT.contiguous()
        self._activation = make_activation(activation, gated=gated)

    def __call__(
        self, x: Tensor, chosen: Tensor, shares: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        top_k = chosen.shape[1]
        slots = chosen.flatten()
        by_expert = slots.argsort(stable=True)
        every = torch.arange(self._up.shape[0], device=x.device)
        # Counting (bincount) would copy its size to the host; a search in the sorted rows does not.
        ends = torch.searchsorted(slots[by_expert], every, right=True).to(torch.int32)
        inner = self._activation(_grouped_product(x[by_expert // top_k], self._up, ends))
        outer = _grouped_product(inner, self._down, ends)
        # Each token gathers its own rows: a GPU that adds rows to tokens by index does so in any
        # order, and the same prompt would have other last bits each time.
        rows_of = by_expert.argsort().view(-1, top_k)
        y = F.embedding_bag(rows_of, outer.float(), per_sample_weights=shares, mode="sum")
        return (y if residual is None else residual + y).to(x.dtype)


def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows [R, in] up to ends[e] times matrices[e] [in, out] -> [R, out]."""
    strides = (rows.stride(0), *matrices.stride()[:2])
    if all(stride * rows.element_size() % ALIGNMENT == 0 for stride in strides):
        product: Tensor = torch._grouped_mm(rows, matrices, offs=ends)
        return product
    # Sizes that no published model has: expert by expert, which copies the ends to the host.
    parts = rows.tensor_split(ends.cpu().long()[:-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
