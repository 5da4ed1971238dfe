"""Rows of a table, one after the other."""

import torch
from torch import Tensor


def lookup(table: Tensor, rows: Tensor, dtype: torch.dtype, *, scale: float = 1.0) -> Tensor:
    """See `engine.ops.backend.Lookup`."""
    return torch.stack([table[row].float() * scale for row in rows.tolist()]).to(dtype)
