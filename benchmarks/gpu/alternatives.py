"""Other sizes of a kernel than those it has, so that one run says which to set."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

LAUNCH: tuple[str, ...] = ("num_warps", "num_stages")
"""Options of a launch."""


class _Launcher:
    """A kernel that is launched with some options instead of its caller's."""

    def __init__(self, kernel: Any, options: Mapping[str, int]) -> None:
        self._kernel, self._options = kernel, options

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        launch = self._kernel[grid]
        return lambda *args, **given: launch(*args, **{**given, **self._options})


@contextmanager
def changed(module: ModuleType, kernel: str, **changes: int) -> Iterator[None]:
    """Constants of a module by name, and `num_warps` and `num_stages` of its `kernel`."""
    options = {name: changes.pop(name) for name in LAUNCH if name in changes}
    before = {name: getattr(module, name) for name in (kernel, *changes)}
    setattr(module, kernel, _Launcher(before[kernel], options))
    for name, value in changes.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(module, name, value)
