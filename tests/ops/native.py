"""The native kernels of a test, which is skipped with the reason where they do not run."""

import pytest
import torch

from engine.native.kernels import Kernels, load_kernels

WHY_NOT = "native kernels do not run here: no compiler at install, or no AVX-512 with bfloat16"


def native_kernels(dtype: torch.dtype = torch.float32) -> Kernels:
    """On one thread for float32, on two for bfloat16: both must give what `naive.py` gives."""
    kernels = load_kernels(dtype)
    if kernels is None:
        pytest.skip(WHY_NOT)
    kernels.threads = 1 if dtype == torch.float32 else 2
    return kernels
