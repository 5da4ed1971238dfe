"""Rows of a table, copied and scaled in one pass."""

import torch
from torch import Tensor

from engine.native.kernels import Kernels


class NativeLookup:
    """See `backend.Lookup`; dtypes are float32 or the kernels', and `dtype` is the wider."""

    def __init__(self, kernels: Kernels) -> None:
        self._run = kernels.lookup
        self._empty = kernels.empty

    def __call__(
        self, table: Tensor, rows: Tensor, dtype: torch.dtype, *, scale: float = 1.0
    ) -> Tensor:
        count = rows.shape[0]
        found = self._empty((count, *table.shape[1:]), dtype)
        self._run(
            table.data_ptr(),
            table.dtype == torch.float32,
            table.stride(0),
            rows.data_ptr(),
            count,
            scale,
            found.data_ptr(),
            dtype == torch.float32,
        )
        return found
