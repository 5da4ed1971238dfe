"""Rows of a table by torch."""

import torch
from torch import Tensor


def lookup(table: Tensor, rows: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Tensor:
    """See `engine.ops.backend.Lookup`."""
    found = table.index_select(0, rows)
    return (found if scale == 1.0 else found.mul_(scale)).to(dtype)
