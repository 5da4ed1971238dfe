"""The listener interface of a KV cache: what becomes findable, and what goes.

The cache calls its listener synchronously, on the engine thread, so a call must be short. A digest
may be stored several times in one group, by different blocks; then each copy is removed by a call
of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.types import TokenId


@dataclass(slots=True, frozen=True)
class CachedBlocks:
    """Findable blocks of one attention group, with the K/V of tokens [`start`, `end`).

    `blocks`: physical ids in token order; the first holds token `start`. `digests`: of the prefixes
    that end at each hash boundary after `start`, itself one, up to `end`. `tail`: of the whole
    prefix, if a block is cached up to an `end` between two boundaries. `filled_from`: the first
    token whose K/V is there, 0 for all; of a window's block that a load has filled in from there
    on. It may lie inside the first hash block.

    A partly filled block stands alone. When it is stored again, fuller or whole, `start` is where
    its stored hash blocks end; what goes is named as a whole, each `tail` apart.

        tokens     0      16      32    41   48      64      80     block of 64, hash blocks of 16
        stored     |== 2 digests ==|tail|                           start 0, end 41
        completed                  |=== 2 digests ===|              start 32, end 64
    """

    group: int
    start: int
    end: int
    digests: tuple[bytes, ...]
    blocks: tuple[int, ...]
    tail: bytes | None = None
    filled_from: int = 0


@dataclass(slots=True, frozen=True)
class CachedStates:
    """A findable checkpoint: the states of all Mamba `groups` after the first `end` tokens.

    `states[i]`: the physical id in `groups[i]`. `digest`: of the whole prefix of `end` tokens.
    """

    groups: tuple[int, ...]
    end: int
    digest: bytes
    states: tuple[int, ...]


Cached = CachedBlocks | CachedStates


class CacheListener(Protocol):
    """Hears every change of what a cache can find.

    Blocks of full attention are stored after the blocks before them, and removed before them or in
    the same call.
    """

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[TokenId, ...],
        *,
        cache_salt: str | None,
    ) -> None:
        """Complete content is findable from now on.

        `parent`: digest at `cached.start`, or at the last hash boundary before the end of a
        checkpoint. `token_ids`: the tokens from there to `cached.end`.
        """

    def removed(self, cached: Cached) -> None:
        """Content cannot be found from now on; until the next step writes, its bytes can be read.

        See `engine.kv_connector.WorkerConnector.start_save`.
        """


class TierListener(Protocol):
    """Hears what a tier after the arena can bring back; tiers are named as in KV events.

    Blocks come and go in any order there: a tier keeps children without their parents.
    """

    def stored_in(
        self,
        tier: str,
        cached: Cached,
        *,
        parent: bytes,
        token_ids: tuple[TokenId, ...],
        cache_salt: str | None,
    ) -> None:
        """Complete content is findable in a tier; `cached` names no physical blocks.

        `parent`, `token_ids` and `cache_salt` as of `CacheListener.stored`; no tokens where the
        tier does not know them.
        """

    def removed_from(self, tier: str, cached: Cached) -> None:
        """It cannot be found there from now on."""


class CacheListeners:
    """Several listeners as one: passes every call on, in their order."""

    def __init__(self, listeners: Sequence[CacheListener]) -> None:
        self._listeners = listeners

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[TokenId, ...],
        *,
        cache_salt: str | None,
    ) -> None:
        for listener in self._listeners:
            listener.stored(cached, parent, token_ids, cache_salt=cache_salt)

    def removed(self, cached: Cached) -> None:
        for listener in self._listeners:
            listener.removed(cached)
