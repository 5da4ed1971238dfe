"""Five interleaved groups: caching, preemption and the order of groups change nothing."""

from random import Random

import pytest

from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.types import GenerateRequest
from tests.e2e.test_prefix_cache import assert_same, conversation_prompts, request_of
from tests.support.nodes.bare_engine import BareEngine
from tests.support.nodes.cluster import CONTEXT, Generation
from tests.support.nodes.five_groups import five_groups, groups_in

FORMED = tuple(range(5))
ORDERS = [(4, 3, 2, 1, 0), (3, 0, 4, 1, 2), (1, 4, 0, 3, 2)]
ROOMY_UNITS = 600
PROMPTS = conversation_prompts(Random(6), 20)
REQUESTS = [request_of(prompt) for prompt in PROMPTS]
# They end in another order than they began, so that states of one group stand in no order.
ANSWERS = [
    request_of(prompt, max_tokens=Random(i).randint(5, 60)) for i, prompt in enumerate(PROMPTS)
]


def plan_of(order: tuple[int, ...], num_units: int = ROOMY_UNITS) -> ArenaPlan:
    unit_bytes = plan_arena(groups_in(order), 16, 1 << 30).unit_bytes
    return plan_arena(groups_in(order), 16, num_units * unit_bytes)


def one_by_one(
    order: tuple[int, ...], requests: list[GenerateRequest], *, prefix_caching: bool = True
) -> list[Generation]:
    plan = plan_of(order)
    with BareEngine(five_groups(plan.groups), plan, prefix_caching=prefix_caching) as engine:
        return [engine.generate(request)[0] for request in requests]


def hits_of(made: list[Generation]) -> list[int]:
    return [one.last.num_cached_tokens for one in made]


def test_the_plan_has_five_groups_in_two_block_sizes() -> None:
    plan = plan_of(FORMED)
    assert len(plan.groups) == 5
    assert sorted({plan.block_size_of(group) for group in FORMED}) == [16, 32]
    assert plan.hash_block_size == 16
    assert all(len(group.layers) < len(plan.groups) for group in plan.groups)


def test_a_hit_changes_no_token() -> None:
    cached = one_by_one(FORMED, REQUESTS)
    uncached = one_by_one(FORMED, REQUESTS, prefix_caching=False)
    for mine, other in zip(cached, uncached, strict=True):
        assert_same(mine, other)
    assert sum(hit > 0 for hit in hits_of(cached)) >= 10


@pytest.mark.parametrize(("length", "last"), [(33, 32), (90, 80), (96, 80), (97, 96), (200, 192)])
def test_an_equal_prompt_hits_up_to_its_last_hash_block(length: int, last: int) -> None:
    prompt = tuple(2 + 7 * place % 500 for place in range(length))
    plan = plan_of(FORMED)
    with BareEngine(five_groups(plan.groups), plan) as engine:
        hits = hits_of([engine.generate(request_of(prompt))[0] for _ in range(2)])
    assert hits == [0, last]


def test_nor_do_evictions_and_preemptions() -> None:
    alone = one_by_one(FORMED, ANSWERS, prefix_caching=False)
    preempted, hits = 0, 0
    for share, at_once in ((1.5, 6), (1.75, 6), (2, 4)):
        tight = plan_of(FORMED, num_units=int(share * plan_of(FORMED).units_for(CONTEXT)))
        with BareEngine(five_groups(tight.groups), tight, max_num_seqs=at_once) as engine:
            together = engine.generate(*ANSWERS)
            preempted += engine.scheduler.stats.num_preemptions
        hits += sum(hits_of(together))
        for mine, other in zip(together, alone, strict=True):
            assert_same(mine, other)
    assert preempted and hits


def test_groups_in_any_order_give_the_same_hits_and_tokens() -> None:
    expected = one_by_one(FORMED, REQUESTS)
    for order in ORDERS:
        made = one_by_one(order, REQUESTS)
        assert hits_of(made) == hits_of(expected), order
        assert [one.logprobs for one in made] == [one.logprobs for one in expected], order
