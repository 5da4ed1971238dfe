"""xxh3-64 of blocks and states, over the arena's own bytes: no copy, and without the GIL.

Finds damage and mix-ups on the way, not forgery: peers are authenticated. Knows no request.
"""

from collections.abc import Sequence

import xxhash

from connector.pd.geometry import geometry_of
from connector.pd.layout import Piece, blocks_announced
from connector.pd.lease import Lease
from engine.arena import ArenaMemory
from engine.errors import TransportError
from engine.kv_cache.plan import ArenaPlan
from engine.rpc.messages import DIGESTS_XXH3_64, BlockRange, Digests


class BlockDigester:
    """Digests of blocks that are fed one after the other, each in one piece or several."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._hash = xxhash.xxh3_64()
        self.done: list[int] = []

    def add(self, offset: int, length: int, *, ends_block: bool) -> None:
        """`length` more bytes of the current block, from byte `offset` of the memory on."""
        self._hash.update(self._memory[offset : offset + length])
        if ends_block:
            self.done.append(self._hash.intdigest())
            self._hash.reset()


class ArenaDigests:
    """What P answers: digests of what a lease holds, computed when a reader asks.

    It asks when it begins to read, so that both work at the same time.
    """

    def __init__(self, plan: ArenaPlan, arena: ArenaMemory) -> None:
        self._plan = plan
        self._geometry = geometry_of(plan)
        self._arena = arena

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Of an arena on a device no digests can be computed yet."""
        return (DIGESTS_XXH3_64,) if self._arena.device_index is None else ()

    def of(self, lease: Lease, ranges: Sequence[BlockRange]) -> Digests:
        """Digests of every block of every range.

        Raises TransportError for ranges that the lease does not hold, and on a device.
        """
        if not self.capabilities:
            raise TransportError(
                f"digests of an arena on device {self._arena.device_index} are not computed yet; "
                "the reader must go without them"
            )
        held = blocks_announced(
            self._plan, self._geometry, lease.offsets, num_tokens=lease.num_tokens
        )
        memory = self._arena.host_bytes()
        return tuple(
            tuple(_digest(memory, pieces) for pieces in held.blocks(asked)) for asked in ranges
        )


def _digest(memory: memoryview, pieces: Sequence[Piece]) -> int:
    hashed = xxhash.xxh3_64()
    for offset, length in pieces:
        hashed.update(memory[offset : offset + length])
    return hashed.intdigest()
