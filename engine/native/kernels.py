"""The native kernels: C++ in `src/`, compiled when the package is installed, called through ctypes.

A kernel takes one struct of eight-byte fields: pointers and sizes as integers, and floats. There is
no binding to torch: any version of it will do. Where there is no compiler, or the processor lacks
what they are compiled for, torch's operators do the same work more slowly.
"""

import ctypes
import importlib.util
from collections.abc import Callable
from functools import cache
from math import prod
from struct import Struct

import structlog
import torch
from torch import Tensor

from engine.native.huge_pages import REGION_BYTES, HugePages
from engine.native.recording import Recording, TorchWork, Workspace

log = structlog.get_logger()

MODULE = "engine.native._kernels"
"""Built by pyproject.toml's `ext-modules`; a shared library, not a module that can be imported."""
DTYPES = (torch.float32, torch.bfloat16)
"""Of models that have native kernels."""

LARGE = 2**16
"""Numbers of a result whose memory is kept for the next one."""

Calls = list[tuple[int, bytes]]
"""Kernels that ran: the address of each and its packed struct."""


class Kernel:
    """One kernel of the library. `fields`: its struct, as in `struct`: q an integer, d a float."""

    def __init__(self, owner: "Kernels", name: str, fields: str) -> None:
        self.name = name
        self._owner = owner
        layout = Struct(fields)
        if _size_of(owner.library, name) != layout.size:
            raise RuntimeError(
                f"{owner.library._name}: kernel {name!r} is of other sources than this package: "
                "install it again"
            )
        self._run = getattr(owner.library, f"tandem_{name}")
        self._run.restype = None
        self._address = ctypes.cast(self._run, ctypes.c_void_p).value or 0
        self._pack = layout.pack

    def __call__(self, *fields: float) -> None:
        packed = self._pack(*fields)
        self._run(packed)
        if self._owner.calls is not None:
            self._owner.calls.append((self._address, packed))


class Kernels:
    """All kernels for one dtype of models, float32 or bfloat16, on `threads` threads."""

    takes_padding = False

    def __init__(self, library: ctypes.CDLL, dtype: torch.dtype, threads: int) -> None:
        self.library = library
        self.dtype = dtype
        self.threads = threads
        self.calls: Calls | None = None
        self.why_not = ""
        self.huge_pages = HugePages()
        self._workspace = Workspace()
        self._results = Workspace(REGION_BYTES)
        self._replay = library.tandem_replay
        name = str(dtype).removeprefix("torch.")
        self.pack = Kernel(self, "pack", "4q")
        self.linear = Kernel(self, f"linear_{name}", "9q")
        self.norm = Kernel(self, f"norm_{name}", "3qd9q")
        self.gated_norm = Kernel(self, f"gated_norm_{name}", "2qd9q")
        self.gate = Kernel(self, f"gate_{name}", "11q")
        self.rotate = Kernel(self, f"rotate_{name}", "11q")
        self.lookup = Kernel(self, f"lookup_{name}", "5qd2q")
        self.conv_step = Kernel(self, f"conv_step_{name}", "13q")
        self.conv_segment = Kernel(self, f"conv_segment_{name}", "11q")
        self.conv_state = Kernel(self, f"conv_state_{name}", "7q")
        self.attention = Kernel(self, f"attention_{name}", "21qd3q")
        self.attention_segment = Kernel(self, f"attention_segment_{name}", "12qd3q")
        self.route = Kernel(self, f"route_{name}", "9q2d4q")
        self.experts = Kernel(self, f"experts_{name}", "15q")
        self.pack_int8 = Kernel(self, f"pack_int8_{name}", "5q")
        self.linear_int8 = Kernel(self, f"linear_int8_{name}", "9q")
        self.ssd_step = Kernel(self, f"ssd_step_{name}", "14q2d3q4q")
        self.ssd_segment = Kernel(self, f"ssd_segment_{name}", "14q2d3q3q")
        self.delta_step = Kernel(self, f"delta_step_{name}", "17qd2q4q")
        self.delta_segment = Kernel(self, f"delta_segment_{name}", "17qd2q3q")

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory for a result, contiguous."""
        if self.calls is not None:
            return self._workspace.take(shape, dtype)
        # The C library gives large memory back to the system at once, which clears every page of
        # it when it comes again: up to a twentieth of a prefill.
        if prod(shape) >= LARGE:
            return self._results.take(shape, dtype)
        return torch.empty(shape, dtype=dtype)

    def record(self, run: Callable[[], Tensor]) -> tuple[Recording | None, Tensor]:
        """Runs a pass and records it; returns its result, which each replay writes anew.

        No recording if torch computed any of it: a replay would leave that out.
        """
        self._workspace.reset()
        self.calls, seen = [], TorchWork()
        try:
            with seen:
                result = run()
            self.why_not = f"torch computes {sorted(set(seen.names))}"
            recording = None if seen.names else Recording(self.calls, self._replay)
        finally:
            self.calls = None
        return recording, result


def load_kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for models of `dtype`, on as many threads as torch has; None without any.

    The log says why they cannot run on this machine.
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


def _size_of(library: ctypes.CDLL, name: str) -> int:
    """Bytes of a kernel's struct, as it was compiled; 0 if there is no such kernel."""
    try:
        return ctypes.c_int64.in_dll(library, f"tandem_{name}_bytes").value
    except ValueError:
        return 0


def pointer(tensor: Tensor | None) -> int:
    """The address of a tensor's first element; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()
