"""The time that native kernels take, by the clock around each call."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import msgspec

from engine.native.kernels import Kernel
from engine.native.recording import Recording

RECORDING = "recording"


class KernelTime(msgspec.Struct, frozen=True):
    """One call of a kernel, by its name, or of a recording of many."""

    name: str
    us: float


@contextmanager
def timed_kernels() -> Iterator[list[KernelTime]]:
    """Collects every call of a native kernel, or of a recording, until the block ends."""
    seen: list[KernelTime] = []

    def timed(run: Callable[..., None]) -> Callable[..., None]:
        def call(owner: Kernel | Recording, *fields: Any) -> None:
            started = perf_counter()
            run(owner, *fields)
            name = owner.name if isinstance(owner, Kernel) else RECORDING
            seen.append(KernelTime(name, 1e6 * (perf_counter() - started)))

        return call

    methods = [(Kernel, "__call__"), (Recording, "replay")]
    own = [getattr(owner, name) for owner, name in methods]
    try:
        for (owner, name), run in zip(methods, own, strict=True):
            setattr(owner, name, timed(run))
        yield seen
    finally:
        for (owner, name), run in zip(methods, own, strict=True):
            setattr(owner, name, run)
