"""xxh3-64 of blocks and states, over the arena's own bytes: no copy, and without the GIL.

Finds damage and mix-ups on the way, not forgery: peers are authenticated. Knows no request.
"""

from collections.abc import Sequence

import xxhash

from engine.arena import ArenaMemory
from engine.errors import TransportError
from engine.kv_cache.plan import ArenaPlan
from engine.rpc.messages import DIGESTS_XXH3_64, Digests


class BlockDigester:
    """Digests of blocks that are fed one after the other, each in one chunk or several."""

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
    """P's side: digests of blocks where they lie."""

    def __init__(self, plan: ArenaPlan, arena: ArenaMemory) -> None:
        self._plan = plan
        self._arena = arena

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Of an arena on a device no digests can be computed yet."""
        return (DIGESTS_XXH3_64,) if self._arena.device_index is None else ()

    def of(self, offsets: Sequence[Sequence[int]]) -> Digests:
        """Digests of the blocks at byte `offsets` by group. Raises TransportError on a device."""
        if not self.capabilities:
            raise TransportError(
                f"digests of an arena on device {self._arena.device_index} are not computed yet; "
                "the reader must go without them"
            )
        memory = self._arena.host_bytes()
        return tuple(
            self._group(memory, blocks, self._plan.block_bytes(group))
            for group, blocks in enumerate(offsets)
        )

    @staticmethod
    def _group(memory: memoryview, offsets: Sequence[int], length: int) -> tuple[int, ...]:
        return tuple(
            xxhash.xxh3_64_intdigest(memory[offset : offset + length]) for offset in offsets
        )
