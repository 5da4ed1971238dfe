"""The scheduler without a model: what a step asks of the cache, and what it counts."""

from itertools import takewhile
from random import Random

import pytest

from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.checkpoints import decode_positions
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, StatePart
from engine.kv_connector import FirstToken, Match, SchedulerConnector
from engine.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.step import (
    BlockLoad,
    ConnectorOutput,
    LoadFailure,
    ModelRunnerOutput,
    SampledToken,
    SchedulerOutput,
)
from engine.types import GenerateRequest, KVTransferParams, SamplingParams
from serving.metrics import SCHEDULER_COUNTERS, SCHEDULER_GAUGES, NodeMetrics
from tests.support.cache.recount import check_scheduler

BLOCK = 16
STATE = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
HYBRID = (KVCacheGroup(STATE, (0, 1)), KVCacheGroup(FullAttentionSpec(1, 16, "float32"), (2,)))
NEW_TOKEN = 7


def scheduler_of(
    units: int = 64,
    *,
    caching: bool = True,
    interval: int = 0,
    connector: SchedulerConnector | None = None,
) -> Scheduler:
    plan = plan_arena(HYBRID, BLOCK, 1 << 22)
    cache = KVCacheManager(
        plan_arena(HYBRID, BLOCK, units * plan.unit_bytes), prefix_caching=caching
    )
    config = SchedulerConfig(
        max_num_batched_tokens=64,
        mamba_decode_checkpoint_interval=interval,
    )
    return Scheduler(config, cache, connector or SchedulerConnector())


def add(
    scheduler: Scheduler,
    name: str,
    prompt: list[int],
    *,
    max_tokens: int = 1,
    params: KVTransferParams | None = None,
    first: FirstToken | None = None,
    boundaries: tuple[int, ...] = (),
) -> Request:
    origin = GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        kv_transfer_params=params,
        cache_boundaries=boundaries,
    )
    request = Request.from_generate(
        origin, scheduler.cache.hasher, max_model_len=1000, eos_token_ids=frozenset()
    )
    scheduler.add(request, first)
    return request


def step(scheduler: Scheduler) -> SchedulerOutput:
    """One step on a device that computes nothing: every request gets the same token."""
    output = scheduler.schedule()
    computed = ModelRunnerOutput(
        {
            item.request_id: SampledToken(NEW_TOKEN, None)
            for item in output.scheduled
            if item.sampling is not None
        }
    )
    scheduler.update(computed, ConnectorOutput())
    check_scheduler(scheduler)
    return output


def run(scheduler: Scheduler) -> list[SchedulerOutput]:
    """Steps until nothing is left to do."""
    outputs = []
    while scheduler.has_work:
        outputs.append(step(scheduler))
    return outputs


def tokens(length: int, first: int = 0) -> list[int]:
    return list(range(first, first + length))


@pytest.mark.parametrize(
    ("prompt", "start", "end", "interval", "positions"),
    [
        (40, 39, 64, 0, ()),
        (40, 62, 63, 32, ()),
        (40, 63, 64, 32, (64,)),
        (40, 64, 65, 32, ()),
        (40, 0, 40, 32, ()),
        (64, 0, 64, 32, ()),
        (64, 64, 128, 32, (96, 128)),
        (40, 40, 200, 64, (64, 128, 192)),
    ],
)
def test_decode_positions_are_multiples_of_the_interval_behind_the_prompt(
    prompt: int, start: int, end: int, interval: int, positions: tuple[int, ...]
) -> None:
    assert decode_positions(prompt, start, end, interval=interval) == positions


@pytest.mark.parametrize(("interval", "kept"), [(0, [32]), (32, [32, 64, 96])])
def test_states_are_kept_while_decoding_only_when_asked_for(interval: int, kept: list[int]) -> None:
    scheduler = scheduler_of(interval=interval)
    add(scheduler, "r", tokens(40), max_tokens=60)
    steps = run(scheduler)
    items = [item for output in steps for item in output.scheduled]
    assert [c.num_tokens for item in items for c in item.saves] == kept


@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("units", [6, 7, 8, 10])
def test_recomputed_tokens_are_those_that_were_computed_again(units: int, caching: bool) -> None:
    """Tokens that a later hit saves are not computed again; tokens nobody computed do not count."""
    scheduler = scheduler_of(units, caching=caching)
    prompts = [tokens(40 + 7 * number, 100 * number) for number in range(6)]
    requests = [
        add(scheduler, str(number), prompt, max_tokens=50) for number, prompt in enumerate(prompts)
    ]
    computed = sum(len(item.token_ids) for output in run(scheduler) for item in output.scheduled)
    needed = sum(request.num_tokens - 1 - request.num_cached_tokens for request in requests)
    stats = scheduler.stats
    assert stats.num_preemptions
    assert computed > needed
    assert stats.recomputed_tokens == {"preemption": computed - needed}


def test_tokens_behind_the_last_kept_state_are_counted_when_attention_was_here() -> None:
    scheduler = scheduler_of()
    shared = tokens(80)
    add(scheduler, "first", [*shared, *tokens(50, 500)])
    run(scheduler)
    assert scheduler.stats.recomputed_tokens == {}
    second = add(scheduler, "second", [*shared, *tokens(30, 600)])
    run(scheduler)
    assert second.num_cached_tokens == 0
    assert scheduler.stats.recomputed_tokens == {"no_checkpoint": 80}
    third = add(scheduler, "third", [*shared, *tokens(20, 700)])
    run(scheduler)
    assert third.num_cached_tokens == 80
    stats = scheduler.stats
    assert stats.recomputed_tokens == {"no_checkpoint": 80}
    assert (stats.prefix_queries, stats.prefix_hits) == (130 + 110 + 100, 80)
    assert stats.checkpoint_hits == 1
    assert stats.checkpoints_written == {"prefill": 4}


def test_a_request_that_ends_early_counts_only_what_was_computed_again() -> None:
    scheduler = scheduler_of()
    add(scheduler, "first", [*tokens(80), *tokens(50, 500)])
    run(scheduler)
    add(scheduler, "second", [*tokens(80), *tokens(30, 600)])
    step(scheduler)
    scheduler.abort("second")
    run(scheduler)
    assert scheduler.stats.recomputed_tokens == {"no_checkpoint": 64}


def test_tokens_lost_to_states_are_those_that_only_attention_has() -> None:
    """Prompts that part anywhere, against a search over what was asked before."""
    random, scheduler = Random(3), scheduler_of(1024)
    asked: list[list[int]] = []
    total = 0
    for number in range(40):
        base = random.choice(asked) if asked else []
        kept = base[: random.randint(0, len(base))]
        prompt = [*kept, *tokens(random.randint(1, 90), 1000 * number)]
        request = add(scheduler, str(number), prompt)
        run(scheduler)
        reach = max((attention_shared(other, prompt) for other in asked), default=0)
        lost = min(reach, len(prompt) - 1) - request.num_cached_tokens
        assert request.num_lost_to_state == lost
        total += lost
        asked.append(prompt)
    assert scheduler.stats.tokens_lost_to_state == total > 0


def attention_shared(cached: list[int], prompt: list[int]) -> int:
    """Tokens of `prompt` whose attention was computed for `cached`, in whole hash blocks or all."""
    pairs = zip(cached, prompt, strict=False)
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return same if same == len(cached) else same // BLOCK * BLOCK


def test_a_state_is_kept_where_the_caller_says_that_prompts_part() -> None:
    scheduler = scheduler_of()
    named = (100, 40, 100, 500, 1)  # in any order, twice, past the prompt, before a hash block
    add(scheduler, "first", tokens(130), boundaries=named)
    saves = [
        save.num_tokens for out in run(scheduler) for one in out.scheduled for save in one.saves
    ]
    assert saves == [32, 96, 128]
    for shared, hit in ((110, 96), (50, 32)):
        other = add(scheduler, str(shared), [*tokens(shared), *tokens(30, 1000 * shared)])
        run(scheduler)
        assert (other.num_cached_tokens, other.num_lost_to_state) == (
            hit,
            shared // BLOCK * BLOCK - hit,
        )


@pytest.mark.parametrize("units", [7, 12, 40])
def test_callers_that_name_many_boundaries_take_no_room_from_requests(units: int) -> None:
    """As many steps and preemptions as if nobody had named one; hints that nobody reads stop."""
    done = []
    for boundaries in ((), tuple(range(16, 272, 16))):
        scheduler = scheduler_of(units)
        for number in range(60):
            add(
                scheduler,
                str(number),
                tokens(90, 200 * number),
                max_tokens=9,
                boundaries=boundaries,
            )
        steps = run(scheduler)
        done.append((len(steps), scheduler.stats.num_preemptions))
        written = scheduler.stats.checkpoints_written.get("prefill", 0)
    assert done[0] == done[1]
    assert written < 60 * 5 / 2


class Elsewhere(SchedulerConnector):
    """Another node has every prompt, and had `num_cached` tokens of it before it was asked."""

    num_cached: int | None = None

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        if request.kv_transfer_params is None:
            return None
        if request.num_failed_loads:
            return Match()
        length = request.num_prompt_tokens
        return Match(Coverage.of(length, (length,)), num_cached_tokens=self.num_cached)

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        return 1


def test_a_failed_load_tells_how_much_was_here_and_how_much_was_computed() -> None:
    """Attention reaches to 80 and a pull would need no more; alone, no state is that far."""
    scheduler = scheduler_of(connector=Elsewhere())
    shared = tokens(80)
    add(scheduler, "local", [*shared, *tokens(50, 500)])
    run(scheduler)
    remote = KVTransferParams(do_remote_prefill=True)
    prompt = [*shared, *tokens(30, 600)]
    pulled = add(
        scheduler, "pulled", prompt, max_tokens=9, params=remote, first=FirstToken(NEW_TOKEN)
    )
    step(scheduler)
    assert pulled.num_cached_tokens == 110  # as from a tier: nobody says that he computed it
    stats = scheduler.stats
    assert (stats.external_queries, stats.external_hits, stats.prefix_hits) == (30, 30, 80)
    scheduler.update_transfers(ConnectorOutput(failed=(LoadFailure("pulled", "transfer_failed"),)))
    run(scheduler)
    assert pulled.is_finished
    assert pulled.num_cached_tokens == 0
    assert stats.recomputed_tokens == {"transfer_failed": 110}
    assert stats.prefix_queries == 130 + 110
    assert stats.checkpoint_hits == 0


def test_a_scrape_shows_what_the_scheduler_counted() -> None:
    scheduler = scheduler_of(interval=32)
    metrics = NodeMetrics("m", "e")
    metrics.read(scheduler, gauges=SCHEDULER_GAUGES, counters=SCHEDULER_COUNTERS)
    for name, tail in (("first", 500), ("second", 600), ("third", 700)):
        add(scheduler, name, [*tokens(80), *tokens(20, tail)], max_tokens=40)
        run(scheduler)

    def sample(name: str, **more: str) -> float | None:
        labels = {"model_name": "m", "engine": "0", "role": "e", **more}
        return metrics.registry.get_sample_value(name, labels)

    assert sample("vllm:prefix_cache_queries_total") == 300
    assert sample("vllm:prefix_cache_hits_total") == 80
    assert sample("vllm:external_prefix_cache_queries_total") == 0
    assert sample("vllm:prompt_tokens_recomputed_total", cause="no_checkpoint") == 80
    assert sample("tandem:mamba_checkpoint_hits_total") == 1
    assert sample("tandem:mamba_checkpoints_written_total", phase="prefill") == 4
    assert sample("tandem:mamba_checkpoints_written_total", phase="decode") == 3
    assert sample("vllm:num_preemptions_total", reason="no_free_units") == 0
    assert sample("tandem:mamba_states") == 0
    assert sample("tandem:mamba_idle_states") == 4 + 3 + 3
