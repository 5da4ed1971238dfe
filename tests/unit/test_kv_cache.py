"""Units, states and blocks: random work against a recount, and the shapes that matter."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from engine.errors import ConfigError
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, form_groups
from engine.kv_cache.tables import BlockTables

MAMBA = MambaSpec("gdn", (3, 64), "float32", (2, 16, 16))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=16, dtype="float32")
HYBRID = form_groups(((MAMBA,), (MAMBA,), (ATTENTION,)))


def small_cache(units: int = 12, groups: tuple[KVCacheGroup, ...] = HYBRID) -> KVCacheManager:
    unit_bytes = plan_arena(groups, 16, 1 << 20).unit_bytes
    return KVCacheManager(plan_arena(groups, 16, units * unit_bytes))


class KVCacheMachine(RuleBasedStateMachine):
    """Requests come, grow and go in any order; the allocator agrees with a recount each time."""

    @initialize(units=st.integers(2, 9))
    def begin(self, units: int) -> None:
        self.cache = small_cache(units)
        self.live: list[tuple[BlockTables, int]] = []

    @rule(num_tokens=st.integers(1, 200))
    def arrive(self, num_tokens: int) -> None:
        free = self.cache.num_free_units
        tables = self.cache.allocate(None, num_tokens)
        if tables is None:
            assert self.cache.num_free_units == free
        else:
            self.live.append((tables, num_tokens))

    @rule(data=st.data(), more=st.integers(1, 60))
    def grow(self, data: st.DataObject, more: int) -> None:
        if not self.live:
            return
        place = data.draw(st.integers(0, len(self.live) - 1))
        tables, num_tokens = self.live[place]
        before = [list(blocks) for blocks in tables.groups]
        if self.cache.allocate(tables, num_tokens + more) is None:
            assert [list(blocks) for blocks in tables.groups] == before
        else:
            self.live[place] = (tables, num_tokens + more)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.live:
            tables, _ = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
            self.cache.free(tables)

    @invariant()
    def recount(self) -> None:
        self.cache.check()
        for tables, num_tokens in self.live:
            assert len(tables.groups[0]) == 1
            assert len(tables.groups[1]) == -(-num_tokens // 16)

    def teardown(self) -> None:
        for tables, _ in self.live:
            self.cache.free(tables)
        self.cache.check()
        assert self.cache.num_free_units == self.cache.plan.num_units


KVCacheMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestKVCache = KVCacheMachine.TestCase


def test_a_short_prompt_costs_one_state_and_one_block() -> None:
    cache = small_cache()
    tables = cache.allocate(None, 12)
    assert tables is not None
    assert [len(blocks) for blocks in tables.groups] == [1, 1]


def test_one_requests_blocks_are_neighbours() -> None:
    cache = small_cache()
    tables = cache.allocate(None, 16 * 8)
    assert tables is not None
    blocks = tables.groups[1]
    assert blocks == list(range(blocks[0], blocks[0] + 8))


def test_states_of_several_requests_are_neighbours() -> None:
    cache = small_cache()
    tables = [cache.allocate(None, 1) for _ in range(3)]
    assert [t.groups[0][0] for t in tables if t] == [0, 1, 2]


def test_a_unit_turns_from_state_to_blocks_and_back() -> None:
    cache = small_cache(units=2)
    tables = cache.allocate(None, 1)
    assert tables is not None
    assert cache.allocate(None, 1) is None
    cache.free(tables)
    again = cache.allocate(None, 1)
    assert again is not None


def test_new_states_are_reported_once_and_not_after_free() -> None:
    cache = small_cache()
    kept, gone = cache.allocate(None, 1), cache.allocate(None, 1)
    assert kept and gone
    cache.free(gone)
    assert cache.take_new_states() == ((0, kept.groups[0][0]),)
    assert cache.take_new_states() == ()


def test_too_little_memory_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="give at least"):
        plan_arena(HYBRID, 16, 1000)


@pytest.mark.parametrize(
    ("linear", "full", "head_dim", "kv_heads", "state"),
    [
        (24, 8, 256, 4, MambaSpec("gdn", (3, 8192), "bfloat16", (32, 128, 128))),
        (36, 12, 256, 2, MambaSpec("gdn", (3, 8192), "bfloat16", (32, 128, 128))),
        (24, 4, 128, 8, MambaSpec("mamba2", (3, 10240), "bfloat16", (128, 64, 128))),
    ],
    ids=["Qwen3.5-4B", "Qwen3-Next-80B-A3B", "Nemotron-H-8B"],
)
def test_published_geometries_keep_small_blocks_with_little_waste(
    linear: int, full: int, head_dim: int, kv_heads: int, state: MambaSpec
) -> None:
    attention = FullAttentionSpec(kv_heads, head_dim, "bfloat16")
    groups = form_groups(((state,),) * linear + ((attention,),) * full)
    plan = plan_arena(groups, 16, 16 << 30)
    assert all(plan.waste(group) < 0.03 for group in range(2))
