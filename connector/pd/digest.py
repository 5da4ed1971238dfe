"""xxh3-64 of blocks and states: of a host arena without a copy, and without the GIL.

Finds damage and mix-ups on the way, not forgery: peers are authenticated.
"""

import os
from collections.abc import Callable, Iterable
from contextlib import suppress

import xxhash

COPY_BYTES = 8 << 20
"""Most bytes that are read at once: from a device each read is a copy on the host."""
ReadBytes = Callable[[int, int], memoryview]
"""Offset and length -> bytes on the host (`engine.arena.ArenaMemory.read`)."""


def step_back() -> None:
    """Run this thread with SCHED_BATCH, so that hashing does not preempt threads that serve."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def digest(read: ReadBytes, pieces: Iterable[tuple[int, int]]) -> int:
    """xxh3-64 of one block or state, given the offset and length of each of its pieces."""
    hashed = xxhash.xxh3_64()
    for offset, length in pieces:
        for start in range(offset, offset + length, COPY_BYTES):
            hashed.update(read(start, min(COPY_BYTES, offset + length - start)))
    return hashed.intdigest()
