"""Units, states and blocks: the shapes that matter; random work is test_kv_cache_machine.py's."""

import sys
import threading
from collections.abc import Iterator

import pytest

from engine.errors import ConfigError
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, StatePart, form_groups
from engine.kv_cache.tables import BlockTables
from tests.support.cache.recount import check_cache

MAMBA = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=16, dtype="float32")
HYBRID = form_groups(((MAMBA,), (MAMBA,), (ATTENTION,)))


def small_cache(units: int = 12, groups: tuple[KVCacheGroup, ...] = HYBRID) -> KVCacheManager:
    unit_bytes = plan_arena(groups, 16, 1 << 20).unit_bytes
    return KVCacheManager(plan_arena(groups, 16, units * unit_bytes))


def reserve(cache: KVCacheManager, num_tokens: int) -> BlockTables | None:
    """Tables of a new request that finds nothing."""
    return cache.start(cache.find_hit(PrefixDigests(cache.hasher, [], None), 0), num_tokens)


def test_a_short_prompt_costs_one_state_and_one_block() -> None:
    cache = small_cache()
    tables = reserve(cache, 12)
    assert tables is not None
    assert [len(blocks) for blocks in tables.groups] == [1, 1]


def test_one_requests_blocks_are_neighbours() -> None:
    cache = small_cache()
    tables = reserve(cache, 16 * 8)
    assert tables is not None
    blocks = tables.groups[1]
    assert blocks == list(range(blocks[0], blocks[0] + 8))


def test_blocks_of_a_prompt_that_comes_in_chunks_are_neighbours_across_units() -> None:
    cache = small_cache()
    tables = reserve(cache, 16)
    assert tables is not None
    for num_blocks in range(2, 5 * cache.plan.blocks_per_unit[1]):
        assert cache.grow(tables, 16 * num_blocks)
    blocks = tables.groups[1]
    assert blocks == list(range(blocks[0], blocks[0] + len(blocks)))


def test_states_of_several_requests_are_neighbours() -> None:
    cache = small_cache()
    tables = [reserve(cache, 1) for _ in range(3)]
    assert [t.groups[0][0] for t in tables if t] == [11, 10, 9]


def test_a_unit_turns_from_state_to_blocks_and_back() -> None:
    cache = small_cache(units=2)
    tables = reserve(cache, 1)
    assert tables is not None
    assert reserve(cache, 1) is None
    cache.free(tables)
    again = reserve(cache, 1)
    assert again is not None


def test_new_states_are_reported_once_and_not_after_free() -> None:
    cache = small_cache()
    kept, gone = reserve(cache, 1), reserve(cache, 1)
    assert kept and gone
    cache.free(gone)
    assert cache.states.take_new() == ((0, kept.groups[0][0]),)
    assert cache.states.take_new() == ()


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 48])
def test_a_prefix_has_one_digest_for_its_tokens_salt_and_seed(num_tokens: int) -> None:
    def digest(num_known: int, num_tokens: int, salt: str | None, seed: str = "seed") -> bytes:
        prefix = PrefixDigests(PrefixHasher(16, seed), list(range(num_known)), salt)
        return prefix.key(num_tokens).digest

    whole = digest(60, num_tokens, "salt")
    assert whole == digest(num_tokens, num_tokens, "salt")
    assert whole != digest(60, num_tokens, None)
    assert whole != digest(60, num_tokens + 1, "salt")
    assert whole != digest(60, num_tokens, "salt", "")


def test_a_private_block_cannot_be_pinned() -> None:
    cache = small_cache()
    tables = reserve(cache, 16)
    assert tables is not None
    for group in (0, 1):
        with pytest.raises(LookupError, match="is not cached"):
            cache.pin({group: tables.groups[group]})
    check_cache(cache, [tables])


def test_too_little_memory_names_what_is_needed() -> None:
    with pytest.raises(ConfigError, match="give at least"):
        plan_arena(HYBRID, 16, 1000)


@pytest.fixture
def switch_often() -> Iterator[None]:
    """Threads change at every chance, as they would in hours of work."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("switch_often")
def test_a_scrape_never_meets_a_half_changed_cache() -> None:
    """Gauges are read from another thread while the engine allocates and frees."""
    num_requests, num_rounds = 40, 300
    cache = KVCacheManager(plan_arena(form_groups(((MAMBA,), (ATTENTION,))), 16, 4 << 20))
    done = threading.Event()
    seen: list[int] = []
    failures: list[RuntimeError] = []

    def scrape() -> None:
        try:
            while not done.is_set():
                seen.append(cache.states.num_used)
        except RuntimeError as error:
            failures.append(error)

    scraper = threading.Thread(target=scrape)
    scraper.start()
    for _ in range(num_rounds):
        tables = [reserve(cache, 20) for _ in range(num_requests)]
        for own in tables:
            assert own is not None
            cache.free(own)
    done.set()
    scraper.join()
    assert not failures
    assert 0 <= min(seen) <= max(seen) <= num_requests
