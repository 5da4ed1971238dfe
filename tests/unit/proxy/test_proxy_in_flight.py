"""Prefixes of prompts under way count beside announced ones; a thread hashes long prompts."""

import threading
from contextlib import ExitStack
from functools import partial

import msgspec
import pytest

from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.types import GenerateRequest, SamplingParams
from proxy.cluster.prefill_queue import PrefillQueue
from proxy.routing.in_flight import LINGER_S, InFlight
from proxy.routing.policies import POLICIES
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NO_HIT, HashKey, NodeHit, RoutedPrompt
from proxy.routing.router import LONG_PROMPT, Router
from serving.kv_events.wire import GPU, BlockStored
from tests.support.api.routed_prompts import EVENTS, SIZE, names, node, prompt, with_events
from tests.support.nodes.clock import Clock


def test_what_is_under_way_is_expected_until_some_seconds_after_its_end() -> None:
    clock = Clock()
    in_flight, asked = InFlight(clock=clock), prompt(range(1000))
    with in_flight.expecting(asked, "p1", EVENTS):
        clock.now += 100.0
        assert in_flight.hits(asked) == {"p1": NodeHit(992, 992)}
        # A longer prompt goes on where the states are, one that differs has only attention.
        assert in_flight.hits(prompt(range(1200))) == {"p1": NodeHit(992, 992)}
        branch = [*range(700), *range(2000, 2300)]
        assert in_flight.hits(prompt(branch)) == {"p1": NodeHit(640, 0)}
        assert in_flight.hits(prompt(range(5, 1000))) == {}
    clock.now += LINGER_S - 0.1
    assert in_flight.hits(asked) == {"p1": NodeHit(992, 992)}
    clock.now += 0.2
    assert in_flight.hits(asked) == {}


def test_states_of_an_earlier_prompt_are_expected_no_longer_than_it() -> None:
    clock = Clock()
    in_flight, asked = InFlight(clock=clock), prompt(range(1000))
    branch = prompt([*range(1000), *range(2000, 2300)])
    with in_flight.expecting(branch, "p1", EVENTS):
        with in_flight.expecting(asked, "p1", EVENTS):
            assert in_flight.hits(asked) == {"p1": NodeHit(992, 992)}
        clock.now += LINGER_S + 0.1
        assert in_flight.hits(asked) == {"p1": NodeHit(896, 0)}


def test_nothing_is_expected_of_failures_restarts_and_nodes_without_events() -> None:
    in_flight, asked = InFlight(), prompt(range(1000))
    with in_flight.expecting(asked, "p1", None):
        assert in_flight.hits(asked) == {}
    with pytest.raises(RuntimeError), in_flight.expecting(asked, "p1", EVENTS):
        raise RuntimeError
    assert in_flight.hits(asked) == {}
    with in_flight.expecting(asked, "p1", EVENTS), in_flight.expecting(asked, "p2", EVENTS):
        in_flight.forget("p1")
        assert in_flight.hits(asked) == {"p2": NodeHit(992, 992)}
    assert in_flight.hits(asked) == {"p2": NodeHit(992, 992)}


async def test_a_burst_of_equal_prompts_meets_on_one_node_before_any_event() -> None:
    router, expected = Router("prefix_aware", PrefixIndex()), []
    queues = dict.fromkeys(("p1", "p2", "p3"), 0)
    chosen = []
    for _ in range(8):
        asked = prompt(range(4000))
        await router.refresh(asked)
        views = [node(name, tokens=queue, events=EVENTS) for name, queue in queues.items()]
        route = router.choose(asked, views, with_events("d1", "d2"))
        assert route.prefill is not None
        chosen.append(names(route))
        queues[route.prefill.name] += 4000 - route.prefill_hit.resumable
        for it in (route.prefill, route.decode):
            expected.append(router.expecting(asked, it))
            expected[-1].__enter__()
    assert chosen[1:] == chosen[:1] * 7
    for each in expected:
        each.__exit__(None, None, None)


class WatchedPrompt(RoutedPrompt):
    """Notes who hashes it."""

    def __init__(self, request: GenerateRequest) -> None:
        super().__init__(request)
        self.hashed_by: list[threading.Thread] = []

    def boundaries(self, key: HashKey) -> list[bytes]:
        if key not in self._digests:
            self.hashed_by.append(threading.current_thread())
        return super().boundaries(key)


@pytest.mark.parametrize(("num_tokens", "is_long"), [(LONG_PROMPT - 1, False), (LONG_PROMPT, True)])
async def test_long_prompts_alone_are_hashed_on_another_thread(
    num_tokens: int, is_long: bool
) -> None:
    index = PrefixIndex()
    for name, seed in (("p1", ""), ("d1", "other")):
        index.set_node(name, msgspec.structs.replace(EVENTS, hash_seed=seed))
    router = Router("prefix_aware", index)
    request = GenerateRequest(request_id="r", prompt_token_ids=tuple(range(num_tokens)))
    asked = WatchedPrompt(request)
    await router.refresh(asked)
    nodes = with_events("p1")
    route = router.choose(asked, nodes, nodes)
    with router.expecting(asked, route.decode):
        router.choose(asked, nodes, nodes)
    is_loop = [each is threading.current_thread() for each in asked.hashed_by]
    assert is_loop == [not is_long] * 2  # once for each seed, and never again


async def test_events_and_expectations_are_one_hit() -> None:
    index = PrefixIndex()
    index.set_node("p1", EVENTS)
    router, asked = Router("prefix_aware", index), prompt(range(1000))
    digests = PrefixDigests(PrefixHasher(SIZE), list(range(1000)), None).boundaries()
    blocks, state = tuple(digests[1:11]), (digests[10],)
    index.apply("p1", [BlockStored(blocks, None, (), SIZE, medium=GPU, group_idx=0)])
    index.apply("p1", [BlockStored(state, None, (), SIZE, medium=GPU, group_idx=1)])
    longer = prompt([*range(600), 5])
    with router.expecting(longer, node("p1", events=EVENTS)):
        await router.refresh(asked)
        route = router.choose(asked, with_events("p1"), with_events("d1"))
    assert route.prefill_hit == NodeHit(592, 592)
    assert asked.hits.keys() == {"p1"}


@pytest.mark.parametrize("policy", POLICIES)
def test_who_scores_a_prompt_is_expected_to_read_no_cached_prefix(policy: str) -> None:
    """Prompt log-probabilities need all of it computed; a D that pulls lacks no attention."""
    router = Router(policy, PrefixIndex())
    hits = {"p1": NodeHit(592, 592, 8, 8), "d1": NodeHit(992, 992, 5, 5)}
    p, d = with_events("p1"), with_events("d1")
    for scores, of_p, of_pull, of_d in (
        (False, hits["p1"], hits["d1"], hits["d1"]),
        (True, NO_HIT, NodeHit(992, 0, 5, 0), NO_HIT),
    ):
        asked = prompt(range(1000), hits)
        sampling = SamplingParams(prompt_logprobs=0 if scores else None)
        asked.request = msgspec.structs.replace(asked.request, sampling=sampling)
        route = router.choose(asked, p, d)
        assert (route.prefill_hit, route.decode_hit) == (of_p, of_pull)
        asked.hits = hits
        alone = router.choose(asked, [], d)
        assert alone.decode_hit == of_d


def test_a_prompt_that_is_computed_counts_less_and_less() -> None:
    """At 100 tokens/s: only the oldest prompt shrinks, never below nothing, and then the next."""
    now = [0.0]
    prompts = PrefillQueue(clock=lambda: now[0])
    left = partial(prompts.num_tokens_left, 100.0)
    with ExitStack() as first, ExitStack() as second:
        first.enter_context(prompts.carrying(200))
        now[0] = 1.0
        second.enter_context(prompts.carrying(50))
        assert (left(), prompts.num_tokens_left(0.0)) == (150, 250)
        now[0] = 9.0
        assert left() == 50
        first.close()
        assert left() == 50
        now[0] = 9.25
        assert left() == 25
    assert (left(), len(prompts)) == (0, 0)


def test_the_end_of_a_prompt_that_waits_leaves_the_oldest_begun() -> None:
    now = [0.0]
    prompts = PrefillQueue(clock=lambda: now[0])
    with prompts.carrying(200):
        with prompts.carrying(50):
            now[0] = 1.0
        assert prompts.num_tokens_left(100.0) == 100
