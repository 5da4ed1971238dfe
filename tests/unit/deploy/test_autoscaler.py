"""The autoscaler in a closed loop with a queueing model: nodes take time to start, work and drain.

A load is in nodes' worth: 3.0 is what three nodes can just serve.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import ceil, cos, pi

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.autoscaler import Autoscaler, Decision, Pool
from deploy.config import DecodeScaling, PrefillScaling
from engine.errors import ConfigError
from serving.config import decode_config
from serving.rpc.messages import ArenaUse, NodeInfo

START_S = 40
UP_S = 10
DOWN_S = 300
# The first new members are asked for and serve, and what they leave is seen.
SETTLED_S = UP_S + START_S + UP_S + 5
PREFILL = PrefillScaling(max_replicas=10)
DECODE = DecodeScaling(max_replicas=10)
PLAIN = NodeInfo(engine_id="e", kind="", model_names=(), max_model_len=1, vocab_size=1)
FIXED_PREFILL: Pool[PrefillScaling] = Pool(1, None, ())
FIXED_DECODE: Pool[DecodeScaling] = Pool(1, None, ())

Load = Callable[[int], float]


# --- the model ---------------------------------------------------------------------------------


class PrefillModel:
    """One prompt after the other; those that are done are held for 2 seconds."""

    tokens_per_prompt = 2000
    tokens_per_s = 8000.0
    requests_per_s = tokens_per_s / tokens_per_prompt

    def __init__(self, serves_at: int) -> None:
        self.serves_at = serves_at
        self.queue: deque[float] = deque()
        self.held: deque[int] = deque()

    @property
    def num_busy(self) -> int:
        return len(self.queue) + len(self.held)

    def add(self, chance: random.Random) -> None:
        self.queue.append(chance.expovariate(1 / self.tokens_per_prompt))

    def work(self, time: int) -> None:
        room = self.tokens_per_s
        while self.queue and self.queue[0] <= room:
            room -= self.queue.popleft()
            self.held.append(time + 2)
        if self.queue:
            self.queue[0] -= room
        while self.held and self.held[0] <= time:
            self.held.popleft()

    def info(self) -> NodeInfo:
        return msgspec.structs.replace(
            PLAIN,
            num_waiting_tokens=ceil(sum(self.queue)),
            num_requests_running=min(1, len(self.queue)),
            num_requests_waiting=max(0, len(self.queue) - 1),
            num_held=len(self.held),
        )


class DecodeModel:
    """Up to 48 answers at once, of 20 seconds each on average; the others wait."""

    answer_s = 20
    requests_per_s = DECODE.target_ongoing_requests / answer_s

    def __init__(self, serves_at: int) -> None:
        self.serves_at = serves_at
        self.waiting: deque[float] = deque()
        self.ends: list[float] = []

    @property
    def num_busy(self) -> int:
        return len(self.waiting) + len(self.ends)

    def add(self, chance: random.Random) -> None:
        self.waiting.append(chance.expovariate(1 / self.answer_s))

    def work(self, time: int) -> None:
        self.ends = [end for end in self.ends if end > time]
        while self.waiting and len(self.ends) < 48:
            self.ends.append(time + self.waiting.popleft())

    def info(self) -> NodeInfo:
        return msgspec.structs.replace(
            PLAIN,
            num_requests_running=len(self.ends),
            num_requests_waiting=len(self.waiting),
            kv_cache_usage=len(self.ends) / 64,
        )


Model = PrefillModel | DecodeModel
Kind = type[PrefillModel] | type[DecodeModel]
MODELS = pytest.mark.parametrize("model", [PrefillModel, DecodeModel])
SEEDS = pytest.mark.parametrize("seed", [0, 1])


@dataclass
class Story:
    """A pool of one role under a load that changes; `wanted` by second, changes as (time, to)."""

    model: Kind
    load: Load
    seed: int = 0
    start: int = 1
    prefill: PrefillScaling = PREFILL
    wanted: list[int] = field(default_factory=list)
    backlog: list[float] = field(default_factory=list)

    def play(self, seconds: int) -> "Story":
        """Asserts for every second what must hold under any load."""
        chance, scaler = random.Random(self.seed), Autoscaler()
        nodes: list[Model] = [self.model(0) for _ in range(self.start)]
        self.wanted.append(self.start)
        changed_at = 0
        for time in range(seconds):
            serving = [node for node in nodes if node.serves_at <= time]
            self._second(time, serving, chance)
            wanted = self._ask(scaler, time, len(nodes), [node.info() for node in serving])
            self._check(wanted, nodes, serving, time - changed_at)
            if wanted != len(nodes):
                changed_at = time
            if wanted < len(nodes):
                nodes.remove(min(serving, key=lambda node: node.num_busy))
            nodes += [self.model(time + START_S) for _ in range(wanted - len(nodes))]
            self.wanted.append(wanted)
        return self

    def _second(self, time: int, serving: Sequence[Model], chance: random.Random) -> None:
        mean = self.load(time) * self.model.requests_per_s
        # Gaps of a Poisson process: as many requests as fit into this second.
        after = chance.expovariate(mean)
        while after < 1.0:
            min(serving, key=lambda node: node.num_busy).add(chance)
            after += chance.expovariate(mean)
        for node in serving:
            node.work(time)
        told = [node.info() for node in serving]
        self.backlog.append(
            sum(one.num_waiting_tokens for one in told) / PREFILL.target_waiting_tokens
            if self.model is PrefillModel
            else sum(one.num_requests_waiting for one in told) / DECODE.target_ongoing_requests
        )

    def _ask(self, scaler: Autoscaler, time: int, num: int, told: Sequence[NodeInfo]) -> int:
        if self.model is PrefillModel:
            decided = scaler.decide(time, Pool(num, self.prefill, told), FIXED_DECODE)["prefill"]
        else:
            decided = scaler.decide(time, FIXED_PREFILL, Pool(num, DECODE, told))["decode"]
        return decided.num_replicas

    def _check(
        self, wanted: int, nodes: Sequence[Model], serving: Sequence[Model], unchanged_s: int
    ) -> None:
        assert 1 <= wanted <= 10
        if wanted > len(nodes):
            assert len(serving) == len(nodes), "grows while new members start"
            assert unchanged_s >= UP_S
        if wanted < len(nodes):
            assert wanted == len(nodes) - 1
            assert min(node.info().num_held for node in serving) == 0, "all hold KV for others"
            assert unchanged_s >= DOWN_S

    @property
    def changes(self) -> list[tuple[int, int]]:
        """Of the wanted number: (second, by how much)."""
        pairs = enumerate(pairwise(self.wanted))
        return [(time, new - old) for time, (old, new) in pairs if new != old]

    @property
    def num_turns(self) -> int:
        """Times that it shrank after it grew, or grew after it shrank."""
        return sum((one > 0) != (other > 0) for (_, one), (_, other) in pairwise(self.changes))

    def is_enough_after(self, seconds: int) -> bool:
        """Whether each need was met so much later; it forgives a fifth of one node."""
        needs = (ceil(self.load(time) - 0.2) for time in range(len(self.wanted) - seconds))
        return all(num >= need for num, need in zip(self.wanted[seconds:], needs, strict=True))


# --- loads over time ---------------------------------------------------------------------------


@MODELS
@SEEDS
def test_a_step_is_served_soon_and_then_nothing_flaps(model: Kind, seed: int) -> None:
    story = Story(model, lambda time: 0.5 if time < 600 else 4.5, seed).play(4800)
    # At first by what waits in the first second, then by what waits once these members serve.
    assert min(story.wanted[600 + SETTLED_S :]) >= 5
    assert len([by for _, by in story.changes if by > 0]) <= 3
    assert story.num_turns <= 1
    assert max(story.backlog[1200:]) < 0.1 * max(story.backlog) + 1.0


@MODELS
@SEEDS
def test_a_ramp_is_followed(model: Kind, seed: int) -> None:
    def load(time: int) -> float:
        return 0.5 + 5.0 * min(1.0, max(0.0, (time - 300) / 1200))

    story = Story(model, load, seed).play(3600)
    assert story.is_enough_after(SETTLED_S)
    assert story.num_turns <= 2


@MODELS
@SEEDS
def test_a_burst_is_one_rise_and_one_fall(model: Kind, seed: int) -> None:
    story = Story(model, lambda time: 6.0 if 600 <= time < 660 else 0.1, seed).play(5000)
    assert max(story.wanted) >= 6
    assert story.num_turns == 1
    assert story.wanted[-1] <= 2


@MODELS
def test_a_day_is_as_many_rises_and_falls_as_it_has(model: Kind) -> None:
    day = 10_800
    story = Story(model, lambda time: 3.05 - 3.0 * cos(2 * pi * time / day)).play(2 * day)
    assert story.is_enough_after(SETTLED_S)
    # Two waves turn three times; short ones on the way are few.
    assert 3 <= story.num_turns <= 5
    assert len(story.changes) <= 30
    assert min(story.wanted[day - 1800 : day + 1800]) <= 2


@MODELS
@SEEDS
def test_noise_around_the_target_moves_little(model: Kind, seed: int) -> None:
    story = Story(model, lambda time: 3.0, seed, start=3).play(7200)
    assert len(story.changes) <= 4
    assert story.num_turns <= 1


@SEEDS
def test_prefill_nodes_that_just_keep_up_with_short_queues_stay(seed: int) -> None:
    """One node fewer would not keep up, whatever the queues say."""
    patient = PrefillScaling(max_replicas=10, target_waiting_tokens=65_536)
    story = Story(PrefillModel, lambda time: 1.2, seed, start=4, prefill=patient).play(7200)
    assert [by for _, by in story.changes] == [-1, -1]


# --- one role in a state that stays -----------------------------------------------------------


def p_node(num_tokens: int = 0, num_held: int = 0) -> NodeInfo:
    fields = {"num_waiting_tokens": num_tokens, "num_requests_waiting": min(1, num_tokens)}
    return msgspec.structs.replace(PLAIN, num_held=num_held, **fields)


def d_node(num_running: int = 0, usage: float = 0.0, num_held: int = 0) -> NodeInfo:
    return msgspec.structs.replace(
        PLAIN, num_requests_running=num_running, kv_cache_usage=usage, num_held=num_held
    )


class Asked:
    """An autoscaler that is asked each second about decode nodes; its answers are not applied."""

    def __init__(self, scaling: DecodeScaling | None = DECODE) -> None:
        self.scaling = scaling
        self.scaler = Autoscaler()
        self.time = 0

    def ask(self, num: int, *told: NodeInfo, seconds: int = 1) -> Decision:
        """The last answer of these seconds."""
        for _ in range(seconds):
            pool = Pool(num, self.scaling, told)
            decided = self.scaler.decide(self.time, FIXED_PREFILL, pool)["decode"]
            self.time += 1
        return decided


def test_it_grows_to_the_least_that_was_needed_all_the_time() -> None:
    asked = Asked()
    assert asked.ask(1, d_node(32 * 8), seconds=5).num_replicas == 1
    assert asked.ask(1, d_node(32 * 3), seconds=5).num_replicas == 1
    decided = asked.ask(1, d_node(32 * 6))
    assert decided.num_replicas == 3
    assert decided.reason == "3 were needed for 10 s: 192 requests, 0% of the KV caches in use"


def test_one_look_at_a_lower_load_starts_the_wait_to_grow_anew() -> None:
    asked = Asked()
    asked.ask(1, d_node(64), seconds=10)
    asked.ask(1, d_node(32))
    assert asked.ask(1, d_node(64), seconds=10).num_replicas == 1
    assert asked.ask(1, d_node(64)).num_replicas == 2


def test_it_shrinks_by_one_after_a_time_without_a_higher_need() -> None:
    asked = Asked()
    idle = (d_node(),) * 4
    asked.ask(4, *idle, seconds=200)
    asked.ask(4, d_node(97), *idle[1:])
    assert asked.ask(4, *idle, seconds=300).num_replicas == 4
    decided = asked.ask(4, *idle)
    assert decided.num_replicas == 3
    assert decided.reason.startswith("1 were enough for 300 s: 0 requests")
    # The time starts anew with the number.
    assert asked.ask(3, *idle[1:], seconds=300).num_replicas == 3
    assert asked.ask(3, *idle[1:]).num_replicas == 2


def test_it_does_not_shrink_while_all_hold_kv_for_others() -> None:
    asked, holds = Asked(), d_node(num_held=1)
    decided = asked.ask(3, holds, holds, holds, seconds=1000)
    assert decided.num_replicas == 3
    assert "1 would be enough, but none is free" in decided.reason
    assert asked.ask(3, holds, holds, d_node(1)).num_replicas == 2


def test_after_a_pause_one_look_does_not_speak_for_the_time_between() -> None:
    asked = Asked()
    asked.ask(1, d_node(), seconds=100)
    asked.time += 60
    assert asked.ask(1, d_node(320), seconds=10).num_replicas == 1
    assert asked.ask(1, d_node(320)).num_replicas == 10


def test_new_members_are_not_missing_again() -> None:
    asked = Asked()
    assert asked.ask(1, d_node(96), seconds=11).num_replicas == 3
    # What waits grows until they serve, and some more is taken for new load only then.
    assert asked.ask(3, d_node(320), seconds=DOWN_S - 1).num_replicas == 3
    assert asked.ask(3, d_node(100), d_node(100), d_node(100), seconds=10).num_replicas == 3
    assert asked.ask(3, d_node(100), d_node(100), d_node(100)).num_replicas == 10


def test_a_member_that_never_serves_does_not_hold_the_others_for_ever() -> None:
    asked = Asked()
    assert asked.ask(2, d_node(96), seconds=DOWN_S + 10).num_replicas == 2
    assert asked.ask(2, d_node(96)).num_replicas == 3


@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        ((), 4),
        # Two that are full and two that may be.
        ((d_node(32), d_node(32)), 4),
        # One is full and one idle: two more may be full, the fourth is too many.
        ((d_node(32), d_node()), 3),
        ((d_node(32), d_node(), d_node(), d_node()), 3),
        # Three nodes' worth where one tells of it, and the silent one may be full.
        ((d_node(96), d_node(), d_node()), 4),
        # More than the two that tell can take is still no more than four can.
        ((d_node(64), d_node(64)), 4),
    ],
)
def test_silent_members_are_no_reason_to_change(told: tuple[NodeInfo, ...], wanted: int) -> None:
    asked = Asked()
    asked.ask(4, *(d_node(32),) * 4, seconds=DOWN_S)
    assert asked.ask(4, *told, seconds=2 * DOWN_S).num_replicas == wanted


def test_a_silent_member_does_not_hold_the_others_once_all_have_served() -> None:
    asked = Asked()
    asked.ask(2, d_node(32), d_node(32))
    asked.ask(2, d_node(96), seconds=10)
    assert asked.ask(2, d_node(96)).num_replicas == 3


def test_a_silent_prefill_node_may_have_work() -> None:
    scaler = Autoscaler()
    told = (p_node(8192 * 2), p_node())
    for time in range(2 * DOWN_S + 1):
        decided = scaler.decide(time, Pool(3, PREFILL, told), FIXED_DECODE)["prefill"]
        assert decided.num_replicas == 3


def test_a_silent_member_is_not_a_new_one_after_the_others_shrank() -> None:
    asked = Asked()
    assert asked.ask(3, d_node(), d_node(), d_node(), seconds=DOWN_S + 1).num_replicas == 2
    assert asked.ask(2, d_node(96), seconds=UP_S).num_replicas == 2
    assert asked.ask(2, d_node(96)).num_replicas == 3


def test_full_arenas_are_a_need_and_kept_prefixes_are_none() -> None:
    arena = ArenaUse(num_units=100, attention=20, idle_attention=80)
    kept = msgspec.structs.replace(d_node(1, usage=0.2), arena=arena)
    assert Asked().ask(2, kept, kept, seconds=100).num_replicas == 2
    # 0.85 of three arenas is in use: just what three may.
    full = d_node(1, usage=0.85)
    assert Asked().ask(3, full, full, full, seconds=11).num_replicas == 3
    fuller = d_node(1, usage=0.86)
    assert Asked().ask(3, full, full, fuller, seconds=11).num_replicas == 4


def test_bounds_hold_at_once_and_a_role_without_scaling_stays() -> None:
    scaling = DecodeScaling(min_replicas=3, max_replicas=5)
    busy = d_node(1000)
    assert Asked(scaling).ask(9, *(busy,) * 9).num_replicas == 5
    assert Asked(scaling).ask(1, busy).num_replicas == 3
    assert Asked(None).ask(9, *(busy,) * 9, seconds=1000).num_replicas == 9
    assert Asked(scaling).ask(3, d_node(), d_node(), d_node(), seconds=1000).num_replicas == 3


def test_scaling_to_nothing_is_refused() -> None:
    """No node would be left to tell that one is needed."""
    with pytest.raises(ConfigError, match="min_replicas"):
        decode_config({"min_replicas": 0, "max_replicas": 2}, DecodeScaling, "decode.autoscaling")
    with pytest.raises(ConfigError, match="per_decode"):
        decode_config({"max_replicas": 2, "per_decode": 0}, PrefillScaling, "prefill.autoscaling")


# --- both roles --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("per_decode", "num_decode", "wanted"), [(0.5, 4, 2), (0.5, 5, 3), (0.28, 25, 7), (1.5, 9, 10)]
)
def test_prefill_nodes_for_each_decode_node(
    per_decode: float, num_decode: int, wanted: int
) -> None:
    scaling = PrefillScaling(max_replicas=10, per_decode=per_decode)
    decode: Pool[DecodeScaling] = Pool(num_decode, None, ())
    scaler, num = Autoscaler(), 1
    for time in range(100):
        prefill = Pool(num, scaling, (p_node(10**6),) * num)
        num = scaler.decide(time, prefill, decode)["prefill"].num_replicas
    assert num == wanted


def test_prefill_follows_decode_up_and_down() -> None:
    scaling = PrefillScaling(max_replicas=10, per_decode=0.5)
    scaler = Autoscaler()
    num_p, num_d, seen = 1, 2, []
    for time in range(4000):
        # Seven nodes' worth, and later one node's; one member of each is always idle.
        requests = 32 * 7 if time < 500 else 32
        told = (d_node(requests), *(d_node(),) * (num_d - 1))
        prefill = Pool(num_p, scaling, (p_node(),) * num_p)
        decided = scaler.decide(time, prefill, Pool(num_d, DECODE, told))
        num_p, num_d = decided["prefill"].num_replicas, decided["decode"].num_replicas
        seen.append((num_d, num_p))
    assert seen[0] == (2, 1)
    assert [seen[UP_S - 1], seen[UP_S]] == [(2, 1), (7, 1)]
    assert [seen[2 * UP_S - 1], seen[2 * UP_S]] == [(7, 1), (7, 4)]
    assert seen[-1] == (1, 1)
    # Never too few for longer than it takes to see it.
    short = [time for time, (d, p) in enumerate(seen) if p < ceil(d / 2)]
    assert len(short) <= UP_S + 1


# --- any load ----------------------------------------------------------------------------------

SCALINGS = st.builds(
    lambda least, more, up, down: DecodeScaling(
        min_replicas=least,
        max_replicas=4 + more,
        target_ongoing_requests=10,
        upscale_delay_s=up,
        downscale_delay_s=down,
    ),
    st.integers(1, 3),
    st.integers(0, 4),
    st.integers(1, 3),
    st.integers(1, 5),
)
NODES = st.builds(
    d_node, st.sampled_from([0, 0, 1, 5, 20, 120]), st.sampled_from([0.0, 0.4, 0.9, 1.0])
)
# Phases, each long enough to be answered. One of four members may be silent.
PHASES = st.lists(
    st.tuples(st.integers(1, 8), st.lists(NODES, min_size=3, max_size=4)), min_size=1, max_size=6
)
Phases = list[tuple[int, list[NodeInfo]]]


@given(SCALINGS, st.integers(0, 12), PHASES)
def test_answers_are_always_within_bounds(scaling: DecodeScaling, num: int, phases: Phases) -> None:
    asked = Asked(scaling)
    for told in (told for seconds, told in phases for _ in range(seconds)):
        decided = asked.ask(num, *told)
        assert scaling.min_replicas <= decided.num_replicas <= scaling.max_replicas
        if scaling.bounded(num) == num:
            assert decided.num_replicas >= num - 1
        num = decided.num_replicas


@settings(max_examples=500)
@given(SCALINGS, PHASES, st.sampled_from([0, 1, 3, 30]), st.sampled_from([0.0, 0.5, 1.0]))
def test_more_load_never_means_fewer_members(
    scaling: DecodeScaling, phases: Phases, more: int, usage: float
) -> None:
    """The number is held at 4, so that both remember the same times."""
    one, other = Asked(scaling), Asked(scaling)
    for told in (told for seconds, told in phases for _ in range(seconds)):
        busier = [
            msgspec.structs.replace(
                node,
                num_requests_running=node.num_requests_running + more,
                kv_cache_usage=max(usage, node.kv_cache_usage),
            )
            for node in told
        ]
        assert one.ask(4, *told).num_replicas <= other.ask(4, *busier).num_replicas
