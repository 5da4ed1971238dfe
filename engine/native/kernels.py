"""The native kernels: C++ in `src/`, compiled when the package is installed, called through ctypes.

A kernel takes one struct of eight-byte fields: pointers and sizes as integers, and floats. There is
no binding to torch, so that any torch may run with them. Where there is no compiler, or the
processor lacks what they are compiled for, torch's operators do the same work more slowly.
"""

import ctypes
import importlib.util
from functools import cache
from struct import Struct

import structlog
import torch
from torch import Tensor

log = structlog.get_logger()

MODULE = "engine.native._kernels"
"""Built by pyproject.toml's `ext-modules`; a shared library, not a module that can be imported."""
DTYPES = (torch.float32, torch.bfloat16)
"""Of models that have native kernels."""


class Kernel:
    """One kernel of the library. `fields`: its struct, as in `struct`: q an integer, d a float."""

    def __init__(self, library: ctypes.CDLL, name: str, fields: str) -> None:
        self._run = getattr(library, f"tandem_{name}")
        self._run.restype = None
        self._pack = Struct(fields).pack

    def __call__(self, *fields: float) -> None:
        self._run(self._pack(*fields))


class Kernels:
    """All kernels for one dtype of models, float32 or bfloat16, on `threads` threads."""

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
        self.dtype = dtype
        self.threads = threads
        name = str(dtype).removeprefix("torch.")
        self.pack = Kernel(library, "pack", "4q")
        self.linear = Kernel(library, f"linear_{name}", "9q")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a result, contiguous."""
        return torch.empty(shape, dtype=dtype)


def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for models of `dtype`, on as many threads as torch; None where they cannot run.

    The log says why not.
    """
    library = _library()
    if library is None or dtype not in DTYPES:
        return None
    return Kernels(library, dtype, torch.get_num_threads())


@cache
def _library() -> ctypes.CDLL | None:
    found = importlib.util.find_spec(MODULE)
    if found is None or found.origin is None:
        log.info("native kernels: not built, torch's operators run", fix="install with a compiler")
        return None
    try:
        # Its OpenMP is the one that torch has loaded.
        library = ctypes.CDLL(found.origin)
    except OSError as error:
        log.warning("native kernels: not loaded, torch's operators run", error=str(error))
        return None
    if not library.tandem_runs_here():
        log.info("native kernels: this processor lacks AVX-512 with bfloat16 and int8")
        return None
    return library


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
