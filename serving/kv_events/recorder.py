"""The cache's changes as KV events, on the engine thread: appended here, taken once per step."""

from collections.abc import Sequence
from typing import NamedTuple

from engine.kv_cache.listener import Cached, CachedBlocks, CachedStates
from engine.types import TokenId
from serving.kv_events.wire import GPU, AllBlocksCleared, BlockRemoved, BlockStored, Event


class AnnouncedGroup(NamedTuple):
    """A KV cache group in vLLM's words: `full_attention`, `sliding_window` or `mamba`.

    `sliding_window`: tokens, None for other kinds.
    """

    kind: str
    sliding_window: int | None = None


class EventRecorder:
    """A `CacheListener` whose events are in units of whole hash blocks, for every physical copy.

    An attention group announces the hash boundaries of its blocks, but none of a window's block
    that lacks its front. A checkpoint is announced in each Mamba group as one block with the digest
    of the whole prefix: `block_size` is the number of tokens, 1 to `hash_block_size`, since the
    hash boundary before its end. The medium is "GPU" wherever the arena lies: it is the first tier.

    What is in the tiers after it is announced likewise; without tokens where it was found in a
    folder, which does not tell them.
    """

    def __init__(self, groups: Sequence[AnnouncedGroup], hash_block_size: int) -> None:
        self._groups = groups
        self._hash_block_size = hash_block_size
        self._events: list[Event] = []
        self._num_in_tiers = 0

    def take(self) -> list[Event]:
        """The changes since the last call, in their order."""
        events, self._events = self._events, []
        return events

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[TokenId, ...],
        *,
        cache_salt: str | None,
    ) -> None:
        start = cached.end - len(token_ids)
        groups: tuple[int, ...]
        digests: tuple[bytes, ...]
        if isinstance(cached, CachedStates):
            digests, groups, size = (cached.digest,), cached.groups, len(token_ids)
        elif _is_announced(cached):
            digests, groups, size = cached.digests, (cached.group,), self._hash_block_size
        else:
            return
        # A prompt's first block has no parent, and alone names the salt, as in vLLM.
        known = None if start == 0 else parent
        salt = cache_salt if start == 0 else None
        # Tokens after the last boundary stay: they are no hash block yet.
        whole = token_ids[: len(digests) * size]
        for group in groups:
            self._announce(group, digests, known, token_ids=whole, block_size=size, salt=salt)

    def cleared(self) -> None:
        """The arena was emptied: one event for all, unless tiers still have something."""
        if not self._num_in_tiers:
            self._events = [AllBlocksCleared()]

    def removed(self, cached: Cached) -> None:
        self._remove(GPU, cached)

    def stored_in(
        self,
        tier: str,
        cached: Cached,
        *,
        parent: bytes,
        token_ids: tuple[TokenId, ...],
        cache_salt: str | None,
    ) -> None:
        """See `engine.kv_cache.listener.TierListener`."""
        self._num_in_tiers += 1
        if isinstance(cached, CachedStates):
            # The tokens since the last hash boundary before its end, as in the arena.
            size = (cached.end - 1) % self._hash_block_size + 1
            start, groups = cached.end - size, cached.groups
            digests: tuple[bytes, ...] = (cached.digest,)
        else:
            size, start = self._hash_block_size, cached.start
            digests, groups = cached.digests, (cached.group,)
        known = None if start == 0 else parent
        whole = token_ids[: len(digests) * size]
        salt = cache_salt if start == 0 and whole else None
        for group in groups if digests else ():
            self._announce(
                group, digests, known, token_ids=whole, block_size=size, salt=salt, medium=tier
            )

    def removed_from(self, tier: str, cached: Cached) -> None:
        """See `engine.kv_cache.listener.TierListener`."""
        self._num_in_tiers -= 1
        self._remove(tier, cached)

    def _remove(self, medium: str, cached: Cached) -> None:
        if isinstance(cached, CachedStates):
            gone = [BlockRemoved((cached.digest,), medium, g) for g in cached.groups]
            self._events.extend(gone)
        elif _is_announced(cached):
            self._events.append(BlockRemoved(cached.digests, medium, cached.group))

    def _announce(
        self,
        group: int,
        digests: tuple[bytes, ...],
        parent: bytes | None,
        *,
        token_ids: tuple[TokenId, ...],
        block_size: int,
        salt: str | None,
        medium: str = GPU,
    ) -> None:
        kind, window = self._groups[group]
        # The salt went into the first block's hash alone.
        extra_keys = None if salt is None else ((salt,), *[None] * (len(digests) - 1))
        self._events.append(
            BlockStored(
                digests,
                parent,
                token_ids,
                block_size,
                lora_id=None,
                medium=medium,
                lora_name=None,
                extra_keys=extra_keys,
                group_idx=group,
                kv_cache_spec_kind=kind,
                kv_cache_spec_sliding_window=window,
            )
        )


def _is_announced(cached: CachedBlocks) -> bool:
    """Whether there are whole hash blocks, in blocks that lack nothing.

    An event cannot say that a block lacks its front. Another copy may hold just that front, and a
    router that hears of both would take the two for one block.
    """
    return bool(cached.digests) and not cached.filled_from
