"""Who waits for room, and when nobody may have to wait."""

from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.coverage import NOTHING, Coverage
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, StatePart, form_groups
from engine.kv_connector import SchedulerConnector
from engine.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.types import GenerateRequest
from tests.support.cache.recount import check_scheduler

MAMBA = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=16, dtype="float32")
GROUPS = form_groups(((MAMBA,), (MAMBA,), (ATTENTION,)))
UNITS = 6


class CountingCache(KVCacheManager):
    """Counts lookups."""

    num_lookups = 0

    def find_hit(
        self,
        prefix: PrefixDigests,
        limit: int,
        external: Coverage = NOTHING,
        *,
        reuse: bool = True,
    ) -> PrefixHit:
        self.num_lookups += 1
        return super().find_hit(prefix, limit, external, reuse=reuse)


def small_cache() -> CountingCache:
    unit_bytes = plan_arena(GROUPS, 16, 1 << 20).unit_bytes
    return CountingCache(plan_arena(GROUPS, 16, UNITS * unit_bytes))


def scheduler_of(cache: KVCacheManager) -> Scheduler:
    limits = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=4096)
    return Scheduler(limits, cache, SchedulerConnector())


def request_of(cache: KVCacheManager, name: str, tokens: list[int]) -> Request:
    origin = GenerateRequest(request_id=name, prompt_token_ids=tuple(tokens))
    return Request.from_generate(
        origin, cache.hasher, max_model_len=4096, eos_token_ids=frozenset()
    )


def scatter(cache: KVCacheManager, tokens: list[int]) -> None:
    """Caches a prompt with each of its blocks in a unit of its own, all the rest of it taken."""
    prefix = PrefixDigests(cache.hasher, tokens, None)
    tables = cache.start(cache.find_hit(prefix, 0), 16)
    assert tables is not None
    rest = 16 * (cache.plan.blocks_per_unit[1] - 1)
    for end in range(32, len(tokens) + 1, 16):
        other = PrefixDigests(cache.hasher, [end] * rest, "other")
        filling = cache.start(cache.find_hit(other, 0), rest)
        assert filling is not None
        cache.publish(filling, other, rest)
        cache.free(filling)
        assert cache.grow(tables, end)
        cache.publish(tables, prefix, end)
    cache.states.take_new()
    cache.retire(tables, prefix, len(tokens))
    cache.free(tables)


def test_a_hit_that_takes_too_many_units_is_left_rather_than_waited_for() -> None:
    cache, tokens = small_cache(), list(range(16 * (UNITS - 1)))
    scatter(cache, tokens)
    longer = [*tokens, 7, 7]
    hit = cache.find_hit(PrefixDigests(cache.hasher, longer, None), len(longer) - 1)
    assert hit.num_tokens == len(tokens)
    assert cache.start(hit, len(longer)) is None
    scheduler = scheduler_of(cache)
    scheduler.add(request_of(cache, "a", longer))
    assert [len(item.token_ids) for item in scheduler.schedule().scheduled] == [len(longer)]
    scheduler.abort("a")
    check_scheduler(scheduler)
    assert cache.usage == 0


def test_who_waits_is_looked_up_again_only_when_something_was_let_go() -> None:
    cache = small_cache()
    scheduler = scheduler_of(cache)
    num_blocks = cache.plan.blocks_per_unit[1] * (UNITS - 2)
    for name in ("first", "second"):
        scheduler.add(request_of(cache, name, [len(name)] * (16 * num_blocks)))
    assert len(scheduler.schedule().scheduled) == 1
    num_lookups = cache.num_lookups
    scheduler.schedule()
    assert cache.num_lookups == num_lookups
    scheduler.abort("first")
    assert [item.request_id for item in scheduler.schedule().scheduled] == ["second"]
