"""The index fed by a real cache: it promises no more than the cache then hits."""

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from hypothesis.stateful import run_state_machine_as_test as run_machine

from engine.kv_cache.coverage import Coverage
from engine.kv_cache.listener import Cached, CachedStates, CacheListener
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from engine.kv_events.wire import GPU, BlockRemoved, BlockStored, Event
from engine.rpc.messages import KVEventsInfo, KVGroupInfo
from engine.types import GenerateRequest
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NO_HIT, RoutedPrompt
from tests.unit.test_kv_cache_machine import CacheMachine

MIXES = [
    ("full",),
    ("state", "full"),
    ("full", "window", "state"),
    ("other", "window", "full", "state", "wide"),
]


class Announcer:
    """A listener that turns calls into events, as a node announces them, for an index."""

    def __init__(self, plan: ArenaPlan, index: PrefixIndex) -> None:
        self._size = plan.hash_block_size
        self._index = index

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[int, ...],
        *,
        cache_salt: str | None = None,
    ) -> None:
        for group, hashes, length in self._announced(cached):
            at_start = cached.end <= length
            known = None if at_start else parent
            event = BlockStored(hashes, known, token_ids, length, medium=GPU, group_idx=group)
            self._send(event)

    def removed(self, cached: Cached) -> None:
        for group, hashes, _ in self._announced(cached):
            self._send(BlockRemoved(hashes, GPU, group))

    def _send(self, event: Event) -> None:
        self._index.apply("node", [event])

    def _announced(self, cached: Cached) -> Iterator[tuple[int, tuple[bytes, ...], int]]:
        """(group, hashes, tokens that the last one covers); a partly filled block is none."""
        length = cached.end % self._size or self._size
        if isinstance(cached, CachedStates):
            for group in cached.groups:
                yield group, (cached.digest,), length
        elif length == self._size:
            yield cached.group, cached.digests, length


class Fork:
    """Two listeners of one cache."""

    def __init__(self, *listeners: CacheListener) -> None:
        self._listeners = listeners

    def stored(self, *told: Any, **named: Any) -> None:
        for listener in self._listeners:
            listener.stored(*told, **named)

    def removed(self, cached: Cached) -> None:
        for listener in self._listeners:
            listener.removed(cached)


def info_of(plan: ArenaPlan) -> KVEventsInfo:
    groups = []
    for group in plan.groups:
        match group.spec:
            case FullAttentionSpec():
                groups.append(KVGroupInfo(kind="full_attention"))
            case SlidingWindowSpec(window=window):
                groups.append(KVGroupInfo(kind="sliding_window", sliding_window=window))
            case MambaSpec():
                groups.append(KVGroupInfo(kind="mamba"))
    return KVEventsInfo(
        endpoint="inproc://none",
        topic="",
        hash_block_size=plan.hash_block_size,
        hash_seed="",
        groups=tuple(groups),
    )


class IndexedCacheMachine(CacheMachine):
    """All that may happen to a cache, with an index that hears of it by events alone."""

    @initialize(mix=st.sampled_from(MIXES), units=st.integers(3, 24), data=st.data())
    def begin(self, mix: tuple[str, ...], units: int, data: st.DataObject) -> None:
        super().begin(mix=mix, units=units, data=data)
        self.index = PrefixIndex()
        self.index.set_node("node", info_of(self.plan))
        self.cache.pool._listener = Fork(self.heard, Announcer(self.plan, self.index))

    @invariant()
    def promises_are_kept(self) -> None:
        for salt, tokens in self.texts[-4:]:
            request = GenerateRequest(request_id="r", prompt_token_ids=tokens, cache_salt=salt)
            promised = self.index.hits(RoutedPrompt(request)).get("node", NO_HIT)
            prefix, length = PrefixDigests(self.hasher, list(tokens), salt), len(tokens)
            on_p = self.cache.find_hit(prefix, length - 1)
            assert promised.resumable <= on_p.num_tokens
            # D looks up the prompt and its first token; states and missing blocks come from P.
            on_d = self.cache.find_hit(prefix, length, Coverage(length, (length,)))
            assert promised.attention <= on_d.num_local
            if all(isinstance(g.spec, FullAttentionSpec | MambaSpec) for g in self.groups):
                assert promised.attention == on_p.branch_point // 4 * 4


EVERYDAY = settings(max_examples=40, stateful_step_count=40, deadline=None, derandomize=True)
MANY = settings(max_examples=300, stateful_step_count=40, deadline=None)


def test_no_promise_is_broken() -> None:
    run_machine(IndexedCacheMachine, settings=EVERYDAY)


@pytest.mark.long
def test_no_promise_is_broken_in_other_runs() -> None:
    run_machine(IndexedCacheMachine, settings=MANY)
