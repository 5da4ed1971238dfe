"""Gauges are read from another thread while the engine allocates and frees."""

import sys
import threading
from collections.abc import Iterator

import pytest

from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, form_groups

MAMBA = MambaSpec("gdn", (3, 64), "float32", (2, 16, 16))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=16, dtype="float32")
REQUESTS = 40
ROUNDS = 300


@pytest.fixture(autouse=True)
def switch_often() -> Iterator[None]:
    """Threads change at every chance, as they would in hours of work."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


def test_a_scrape_never_meets_a_half_changed_cache() -> None:
    cache = KVCacheManager(plan_arena(form_groups(((MAMBA,), (ATTENTION,))), 16, 4 << 20))
    nothing = cache.find_hit(PrefixDigests(cache.hasher, [], None), 0)
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
    for _ in range(ROUNDS):
        tables = [cache.start(nothing, 20) for _ in range(REQUESTS)]
        for own in tables:
            assert own is not None
            cache.free(own)
    done.set()
    scraper.join()
    assert not failures
    assert 0 <= min(seen) <= max(seen) <= REQUESTS
