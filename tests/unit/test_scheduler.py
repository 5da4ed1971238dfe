"""The scheduler without a model: what a step asks of the cache, and what it counts."""

import pytest

from engine.config import SchedulerConfig
from engine.kv_cache.checkpoints import decode_positions
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec
from engine.kv_connector import local_connector
from engine.request import Request
from engine.sched.scheduler import Scheduler
from engine.step import ConnectorOutput, SampledToken, SchedulerOutput
from engine.types import GenerateRequest, SamplingParams

BLOCK = 16
STATE = MambaSpec("gdn", (3, 64), "float32", (2, 16, 16))
HYBRID = (KVCacheGroup(STATE, (0, 1)), KVCacheGroup(FullAttentionSpec(1, 16, "float32"), (2,)))
NEW_TOKEN = 7


def scheduler_of(units: int = 64, *, caching: bool = True, interval: int = 0) -> Scheduler:
    plan = plan_arena(HYBRID, BLOCK, 1 << 22)
    cache = KVCacheManager(
        plan_arena(HYBRID, BLOCK, units * plan.unit_bytes), prefix_caching=caching
    )
    config = SchedulerConfig(
        max_model_len=1000,
        max_num_batched_tokens=64,
        mamba_decode_checkpoint_interval=interval,
    )
    return Scheduler(config, cache, local_connector().scheduler)


def add(scheduler: Scheduler, name: str, prompt: list[int], max_tokens: int = 1) -> Request:
    origin = GenerateRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
    )
    request = Request.from_generate(
        origin, scheduler.cache.hasher, max_model_len=1000, eos_token_ids=frozenset()
    )
    scheduler.add(request)
    return request


def step(scheduler: Scheduler) -> SchedulerOutput:
    """One step on a device that computes nothing: every request gets the same token."""
    output = scheduler.schedule()
    sampled = {
        item.request.request_id: SampledToken(NEW_TOKEN, None)
        for item in output.scheduled
        if item.samples
    }
    scheduler.update(output, sampled, ConnectorOutput())
    scheduler.check()
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
    assert [c.num_tokens for item in items for c in item.checkpoints] == kept
