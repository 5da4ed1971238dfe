"""Code that a CUDA graph holds, or that runs a step ahead, may not ask the device for numbers.

On a CPU such a question costs nothing, so tests must look for it. Triton's interpreter, which reads
all of its arguments, is left alone while a kernel runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor


class HostAccess(AssertionError):
    """The host asked the device for numbers, or for a size that depends on numbers."""


READING = frozenset(
    {"item", "tolist", "numpy", "cpu", "nonzero", "argwhere", "masked_select", "is_nonzero"}
    | {"equal", "allclose", "unique", "unique_consecutive", "bincount", "histc", "__array__"}
    | {"__bool__", "__int__", "__float__", "__complex__", "__index__", "__contains__"}
)
"""Functions of tensors and of `torch`, by name."""


class _NoReading(TorchFunctionMode):
    """A mode of functions: one of operators would import torch's compiler, for some seconds."""

    is_on = True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if self.is_on:
            if name in READING or (name == "where" and len(args) == 1):
                _refuse(name)
            if name in ("__getitem__", "__setitem__") and _reads(args[1]):
                _refuse(f"{name} by a mask, or by a number that the device has")
            # Without its size the result is as long as the numbers say.
            counts = args[1] if len(args) > 1 else given.get("repeats", args[0])
            is_told = given.get("output_size") is not None
            if name == "repeat_interleave" and isinstance(counts, Tensor) and not is_told:
                _refuse(name)
        return func(*args, **given)


def _reads(index: Any) -> bool:
    """True of an index that holds a mask, or a tensor of no dimension, which selects or bounds."""
    for one in index if isinstance(index, tuple) else (index,):
        parts = (one.start, one.stop, one.step) if isinstance(one, slice) else (one,)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if any(each.dim() == 0 or each.dtype in (torch.bool, torch.uint8) for each in tensors):
            return True
    return False


def _refuse(name: str) -> NoReturn:
    raise HostAccess(f"{name}: the host would wait for the device")


@contextmanager
def no_host_access() -> Iterator[None]:
    """Raises HostAccess where code below reads a tensor's numbers or needs them for a size.

    Found: `item`, `tolist`, `numpy`, `cpu`, `bool()`, `int()`, `float()`, a tensor as a list's
    index or of no dimension as a tensor's, masks as indices, `nonzero`, `unique`, `bincount`,
    `repeat_interleave` without a size. Not found: `.to("cpu")`, `copy_` to the host
    and `torch.tensor(..., device=...)`, which look alike on a CPU; the first two raise where the
    tensors are on `meta`.
    """
    mode = _NoReading()
    run = GridExecutor.__call__

    def unwatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        mode.is_on = False
        try:
            return run(self, *args, **kwargs)
        finally:
            mode.is_on = True

    GridExecutor.__call__ = unwatched
    try:
        with mode:
            yield
    finally:
        GridExecutor.__call__ = run
