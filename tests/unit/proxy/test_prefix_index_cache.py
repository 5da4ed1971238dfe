"""The index fed by a real cache: it promises no more than the cache then hits."""

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant
from hypothesis.stateful import run_state_machine_as_test as run_machine

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.listener import Cached, CacheListeners
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec
from engine.types import GenerateRequest
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NO_HIT, RoutedPrompt
from serving.kv_events.recorder import EventRecorder
from serving.node.kv_events import announced
from serving.rpc.messages import KVEventsInfo, KVGroupInfo
from tests.unit.kv_cache.test_kv_cache_machine import MIXES, CacheMachine


class Announcer(EventRecorder):
    """A node's recorder, whose events an index gets at once."""

    def __init__(self, plan: ArenaPlan, index: PrefixIndex) -> None:
        super().__init__([announced(group.spec) for group in plan.groups], plan.hash_block_size)
        self._index = index

    def stored(self, *told: Any, **named: Any) -> None:
        super().stored(*told, **named)
        self._index.apply("node", self.take())

    def removed(self, cached: Cached) -> None:
        super().removed(cached)
        self._index.apply("node", self.take())


def info_of(plan: ArenaPlan) -> KVEventsInfo:
    groups = tuple(KVGroupInfo(*announced(group.spec)) for group in plan.groups)
    return KVEventsInfo(endpoint="none", hash_block_size=plan.hash_block_size, groups=groups)


class IndexedCacheMachine(CacheMachine):
    """All that may happen to a cache, with an index that hears of it by events alone."""

    @initialize(
        mix=st.sampled_from(MIXES),
        units=st.integers(3, 24),
        step=st.sampled_from([4, 2, 1]),
        data=st.data(),
    )
    def begin(self, mix: tuple[str, ...], units: int, step: int, data: st.DataObject) -> None:
        super().begin(mix=mix, units=units, step=step, data=data)
        self.index = PrefixIndex()
        self.index.set_node("node", info_of(self.plan))
        self.cache.pool._listener = CacheListeners([self.heard, Announcer(self.plan, self.index)])

    @invariant()
    def promises_are_kept(self) -> None:
        for salt, tokens in self.texts[-4:]:
            request = GenerateRequest(request_id="r", prompt_token_ids=tokens, cache_salt=salt)
            promised = self.index.hits(RoutedPrompt(request)).get("node", NO_HIT)
            prefix, length = PrefixDigests(self.hasher, list(tokens), salt), len(tokens)
            on_p = self.cache.find_hit(prefix, length - 1)
            assert promised.resumable <= on_p.num_tokens
            # D looks up the prompt and its first token; states and missing blocks come from P.
            # A load brings whole blocks: larger ones may cost D what it has of their beginnings.
            on_d = self.cache.find_hit(prefix, length, Coverage.of(length, (length,)))
            if self.plan.joint_block_size == self.plan.hash_block_size:
                assert promised.attention <= on_d.num_local
            if all(isinstance(g.spec, FullAttentionSpec | MambaSpec) for g in self.groups):
                size = self.plan.hash_block_size
                assert promised.attention == on_p.branch_point // size * size


EVERYDAY = settings(max_examples=40, stateful_step_count=40)
MANY = settings(max_examples=300, stateful_step_count=40, derandomize=False)


def test_no_promise_is_broken() -> None:
    run_machine(IndexedCacheMachine, settings=EVERYDAY)


@pytest.mark.long
def test_no_promise_is_broken_in_other_runs() -> None:
    run_machine(IndexedCacheMachine, settings=MANY)
