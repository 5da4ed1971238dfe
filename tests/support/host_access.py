"""Code that a CUDA graph holds, or that runs a step ahead, may not ask the device for numbers.

On a CPU such a question costs nothing, so tests must look for it. Triton's interpreter, which reads
all of its arguments, is left alone while a kernel runs.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor


class HostAccess(AssertionError):
    """The host asked the device for numbers, or for a size that depends on numbers."""


METHODS = frozenset(
    f"{kind}{name}{kind}"
    for kind, names in {
        "": "item tolist numpy cpu nonzero argwhere masked_select is_nonzero equal allclose",
        "__": "bool int float complex index contains array",
    }.items()
    for name in names.split()
)
"""Of tensors and of `torch`."""

OPERATORS = frozenset(
    {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "bincount", "histc"}
    | {"_unique2", "unique_dim", "unique_consecutive", "unique_dim_consecutive"}
)
"""Of ATen: what the methods above and torch's own functions end in."""


class _Switch:
    """`is_on` is False while the interpreter runs a kernel."""

    def __init__(self) -> None:
        self.is_on = True


class _NoMethods(TorchFunctionMode):
    """Refuses methods that read a tensor of a CPU without any operator, and all others by name."""

    def __init__(self, switch: _Switch) -> None:
        super().__init__()
        self._switch = switch

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        name = getattr(func, "__name__", "")
        if self._switch.is_on:
            if name in METHODS or (name == "where" and len(args) == 1):
                _refuse(name)
            if name in ("__getitem__", "__setitem__") and _reads(args[1]):
                _refuse(f"{name} by a number that the device has")
        return func(*args, **(kwargs or {}))


class _NoOperators(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses operators that would wait for the device."""

    def __init__(self, switch: _Switch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._switch = switch

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = kwargs or {}
        if self._switch.is_on:
            name = func.overloadpacket.__name__
            if name in OPERATORS:
                _refuse(name)
            if name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
                one is not None and one.dtype in (torch.bool, torch.uint8) for one in args[1]
            ):
                _refuse(f"{name} by a mask")
            # Without its size the result is as long as the numbers say.
            if name == "repeat_interleave" and given.get("output_size") is None:
                _refuse(name)
        return func(*args, **given)


def _reads(index: Any) -> bool:
    """True of an index that holds a tensor of no dimension, which selects, or bounds a slice."""
    for one in index if isinstance(index, tuple) else (index,):
        parts = (one.start, one.stop, one.step) if isinstance(one, slice) else (one,)
        if any(isinstance(part, Tensor) and part.dim() == 0 for part in parts):
            return True
    return False


def _refuse(name: str) -> NoReturn:
    raise HostAccess(f"{name}: the host would wait for the device")


@contextmanager
def no_host_access() -> Iterator[None]:
    """Raises HostAccess where code below reads a tensor's numbers or needs them for a size.

    Found: `item`, `tolist`, `numpy`, `cpu`, `bool()`, `int()`, `float()`, a tensor as a list's
    index or of no dimension as a tensor's, masks as indices, `nonzero`, `unique`, `bincount`,
    `repeat_interleave` without a size. Not found: `.to("cpu")`, `copy_` that waits, and
    `torch.tensor(..., device=...)`, which look alike on a CPU.
    """
    switch = _Switch()
    run = GridExecutor.__call__

    def unwatched(self: Any, *args: Any, **kwargs: Any) -> Any:
        switch.is_on = False
        try:
            return run(self, *args, **kwargs)
        finally:
            switch.is_on = True

    with ExitStack() as stack:
        GridExecutor.__call__ = unwatched
        stack.callback(setattr, GridExecutor, "__call__", run)
        stack.enter_context(_NoMethods(switch))
        stack.enter_context(_NoOperators(switch))
        yield
