"""The listener interface of a KV cache: what becomes findable, and what goes.

The cache calls its listener synchronously, on the engine thread, so a call must be short. A digest
may be stored several times in one group, by different blocks; then each copy is removed by a call
of its own.
"""

from dataclasses import dataclass
from typing import Protocol

from engine.types import TokenId


@dataclass(slots=True, frozen=True)
class CachedBlocks:
    """Findable blocks of one attention group, with the K/V of tokens [`start`, `end`).

    `blocks`: physical ids in token order; the first holds token `start` in its first slot.
    `digests`: of the prefixes that end at each hash boundary after `start`, up to `end`. A partly
    filled block stands alone, with the one digest of the whole prefix of `end` tokens.
    """

    group: int
    start: int
    end: int
    digests: tuple[bytes, ...]
    blocks: tuple[int, ...]


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

    def stored(self, cached: Cached, parent: bytes, token_ids: tuple[TokenId, ...]) -> None:
        """Complete content is findable from now on.

        `token_ids`: the tokens between the prefix with digest `parent` and `cached.end`.
        """

    def removed(self, cached: Cached) -> None:
        """Content cannot be found from now on; until the next step writes, its bytes can be read.

        See `engine.kv_connector.WorkerConnector.start_save`.
        """
