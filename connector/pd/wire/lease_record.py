"""The record of a lease as readers find it in P's memory: that it lives, and digests of its blocks.

    word  0            1                   2 .. 5    6                   7
        | generation | number of digests | holding | digest of block 0 | of block 1 | ...

A digest of 0 means that P has not hashed this block yet; states come last. The holding is a digest
of the prompt and of its block ids (`params.holding_of`): P itself says that it holds
this prompt in these blocks.

A digest is made of pieces of 64 KiB, the same way wherever the arena is (`engine.digests`): xxh3-64
over the xxh3-64 of each piece, and of a block of one piece just that one.

    200 KiB  |  64 KiB  |  64 KiB  |  64 KiB + 8 KiB  |     the rest has no piece of its own
    digest   xxh3-64( d0, d1, d2 )                          8 bytes each, little-endian

Order on P: generation written > lease granted > blocks valid > generation cleared > blocks free.
So D reads the record last: an unchanged generation proves that the blocks were valid throughout the
read.

Records lie in a region of host memory of their own, wherever the arena is. Peers read it like any
other bytes, so a record costs no message to P, nor any of its time:

    region 1  |  records of this node's leases  |  64 places for records that arrive from peers  |
              0                             NUM_WORDS                                 2 * NUM_WORDS
"""

import os
import struct
from contextlib import suppress
from typing import NamedTuple

REGION = 1
"""Its number for the transport; region 0 is the arena."""
WORD_BYTES = 8
HEADER_WORDS = 6
NUM_WORDS = 1 << 17
"""For all records of a node; part of the protocol."""
REGION_BYTES = 2 * NUM_WORDS * WORD_BYTES
NUM_PLACES = 64
"""As many pulls as a node may run at once (`PdConnectorConfig.max_concurrent_pulls`)."""
MAX_DIGESTS = NUM_WORDS // NUM_PLACES - HEADER_WORDS
"""In one record; of a longer lease P must be asked."""
UNKNOWN = 0
"""Instead of a digest: P has not hashed this block yet."""
_HEADER = struct.Struct("=QQ32s")


class RecordHeader(NamedTuple):
    """The first words of a record. `holding`: 32 bytes of SHA-256, `params.holding_of`."""

    generation: int
    num_digests: int
    holding: bytes

    def write(self, words: "memoryview[int]") -> None:
        """Write it over the first words of `words`."""
        _HEADER.pack_into(words.cast("B"), 0, *self)

    @classmethod
    def read(cls, words: "memoryview[int]") -> "RecordHeader":
        """The header at the beginning of `words`."""
        return cls(*_HEADER.unpack_from(words.cast("B")))


def start_of(generation: int) -> int:
    """The first word of the record of a lease, in the region of its node."""
    return generation % NUM_WORDS


def step_back() -> None:
    """Run this thread with SCHED_BATCH, so that hashing does not preempt threads that serve."""
    with suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
