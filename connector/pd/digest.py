"""xxh3-64 of blocks and states, over the arena's own bytes: no copy, and without the GIL.

Finds damage and mix-ups on the way, not forgery: peers are authenticated.
"""

import os
from collections.abc import Iterable
from contextlib import suppress

import xxhash


def step_back() -> None:
    """Run this thread with SCHED_BATCH, so that hashing does not preempt threads that serve."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def digest(memory: memoryview, pieces: Iterable[tuple[int, int]]) -> int:
    """xxh3-64 of one block or state, given the offset and length of each of its pieces."""
    hashed = xxhash.xxh3_64()
    for offset, length in pieces:
        hashed.update(memory[offset : offset + length])
    return hashed.intdigest()
