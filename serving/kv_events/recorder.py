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
        self.stored_in(GPU, cached, parent=parent, token_ids=token_ids, cache_salt=cache_salt)

    def cleared(self) -> None:
        """The arena was emptied: one event for all, unless tiers still have something."""
        if not self._num_in_tiers:
            self._events = [AllBlocksCleared()]

    def removed(self, cached: Cached) -> None:
        self.removed_from(GPU, cached)

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
        self._num_in_tiers += tier != GPU  # the arena itself is told as the tier GPU
        groups: tuple[int, ...]
        digests: tuple[bytes, ...]
        if isinstance(cached, CachedStates):
            # The tokens since the last hash boundary before its end.
            size = (cached.end - 1) % self._hash_block_size + 1
            start, digests, groups = cached.end - size, (cached.digest,), cached.groups
        elif _is_announced(cached):
            size, start = self._hash_block_size, cached.start
            digests, groups = cached.digests, (cached.group,)
        else:
            return
        # Tokens after the last boundary stay: they are no hash block yet.
        whole = token_ids[: len(digests) * size]
        # A prompt's first block has no parent, and alone names the salt, as in vLLM.
        extra_keys = None
        if start == 0 and whole and cache_salt is not None:
            extra_keys = ((cache_salt,), *[None] * (len(digests) - 1))
        for group in groups:
            kind, window = self._groups[group]
            self._events.append(
                BlockStored(
                    digests,
                    None if start == 0 else parent,
                    whole,
                    size,
                    medium=tier,
                    extra_keys=extra_keys,
                    group_idx=group,
                    kv_cache_spec_kind=kind,
                    kv_cache_spec_sliding_window=window,
                )
            )

    def removed_from(self, tier: str, cached: Cached) -> None:
        """See `engine.kv_cache.listener.TierListener`."""
        self._num_in_tiers -= tier != GPU
        if isinstance(cached, CachedStates):
            gone = [BlockRemoved((cached.digest,), tier, g) for g in cached.groups]
            self._events.extend(gone)
        elif _is_announced(cached):
            self._events.append(BlockRemoved(cached.digests, tier, cached.group))


def _is_announced(cached: CachedBlocks) -> bool:
    """Whether there are whole hash blocks, in blocks that lack nothing.

    An event cannot say that a block lacks its front. Another copy may hold just that front, and a
    router that hears of both would take the two for one block.
    """
    return bool(cached.digests) and not cached.filled_from
