"""A mixture of experts as two grouped products over rows that are sorted by expert.

    slots (token, choice)   t0:e2 t0:e0 t1:e2 t1:e1
    sorted by expert        t0:e0 | t1:e1 | t0:e2 t1:e2
    ends of the experts     1       2       4

The ends stay on the device: the host never waits for what the router chose.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

ALIGNMENT = 16
"""Bytes: `torch._grouped_mm` takes no rows whose distance is not a multiple of it."""


def experts(
    x: Tensor,
    chosen: Tensor,
    shares: Tensor,
    up: Tensor,
    down: Tensor,
    *,
    activation: Callable[[Tensor], Tensor],
) -> Tensor:
    """See `engine.ops.backend.MixtureOfExperts`."""
    top_k = chosen.shape[1]
    slots = chosen.flatten()
    by_expert = slots.argsort(stable=True)
    every = torch.arange(up.shape[0], device=x.device)
    # Counting (bincount) would copy its size to the host; a search in the sorted rows does not.
    ends = torch.searchsorted(slots[by_expert], every, right=True).to(torch.int32)
    inner = activation(_grouped_product(x[by_expert // top_k], up, ends))
    outer = _grouped_product(inner, down, ends)
    # Each token gathers its own rows: a GPU that adds rows to tokens by index does so in any order,
    # and the same prompt would have other last bits each time.
    rows_of = by_expert.argsort().view(-1, top_k)
    return F.embedding_bag(rows_of, outer.float(), per_sample_weights=shares, mode="sum")


def _grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Rows [R, in] up to ends[e] times matrices[e] [in, out] -> [R, out]."""
    strides = (rows.stride(0), *matrices.stride()[:2])
    if all(stride * rows.element_size() % ALIGNMENT == 0 for stride in strides):
        product: Tensor = torch._grouped_mm(rows, matrices, offs=ends)
        return product
    # Sizes that no published model has: expert by expert, which copies the ends to the host.
    parts = rows.tensor_split(ends.cpu().long()[:-1])
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
