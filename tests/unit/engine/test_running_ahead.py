"""Steps that are launched before the tokens of the step before are known."""

import random
from dataclasses import dataclass, field

import pytest

from engine.core import EngineCore
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.spec import (
    FullAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
    form_groups,
)
from engine.kv_connector import Connector, LocalAdmission, SchedulerConnector, WorkerConnector
from engine.request import Request
from engine.sched.scheduler import Scheduler, SchedulerConfig
from engine.step import StepNews
from engine.types import BadWord, FinishReason, GenerateRequest, SamplingParams
from tests.support.cache.recount import check_scheduler
from tests.support.nodes.late_device import LateDevice, expected_choice
from tests.tiers import everyday

MAMBA = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=16, dtype="float32")
WINDOW = SlidingWindowSpec(num_kv_heads=1, head_dim=16, dtype="float32", window=9)
GROUPS = form_groups(((MAMBA,), (ATTENTION,), (WINDOW,)))
BLOCK, VOCAB, EOS = 4, 23, frozenset({3, 7, 11})


@dataclass
class Asked:
    """A request, and what has come of it."""

    prompt: list[int]
    sampling: SamplingParams
    output: list[int] = field(default_factory=list)
    finish: FinishReason | None = None


class Engine:
    """Real scheduler and cache before a device that works late."""

    def __init__(self, draw: random.Random, *, num_units: int, interval: int = 0) -> None:
        unit_bytes = plan_arena(GROUPS, BLOCK, 1 << 20).unit_bytes
        self.plan = plan_arena(GROUPS, BLOCK, num_units * unit_bytes)
        sides = Connector(LocalAdmission(), SchedulerConnector(), WorkerConnector())
        limits = SchedulerConfig(
            max_num_seqs=4, max_num_batched_tokens=24, mamba_decode_checkpoint_interval=interval
        )
        self.cache = KVCacheManager(self.plan)
        self.scheduler = Scheduler(limits, self.cache, sides.scheduler)
        self.device = LateDevice(self.plan, VOCAB, draw)
        self.core = EngineCore(self.scheduler, self.device, sides)  # type: ignore[arg-type]
        self.asked: dict[str, Asked] = {}

    def add(self, prompt: list[int], **params: object) -> str:
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        name = str(len(self.asked))
        origin = GenerateRequest(request_id=name, prompt_token_ids=tuple(prompt), sampling=sampling)
        self.asked[name] = Asked(prompt, sampling)
        self.scheduler.add(
            Request.from_generate(origin, self.cache.hasher, max_model_len=96, eos_token_ids=EOS)
        )
        return name

    def abort(self, name: str) -> None:
        self.take(self.core.settle())
        check_scheduler(self.scheduler)
        self.scheduler.abort(name)

    def step(self) -> None:
        self.take(self.core.step()[0])

    def take(self, news: StepNews) -> None:
        assert not news.errors
        for name, output in news.outputs:
            self.asked[name].output += output.token_ids
            self.asked[name].finish = output.finish_reason

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()
        check_scheduler(self.scheduler)
        assert self.cache.usage == 0

    def check(self, name: str) -> None:
        """Compares an output with what a model without a cache would say."""
        asked, tokens = self.asked[name], list(self.asked[name].prompt)
        for place, found in enumerate(asked.output):
            assert found == expected_choice(self.plan, tokens, VOCAB), (name, place)
            tokens.append(found)
        stops = EOS | set(asked.sampling.stop_token_ids)
        ends = [token in stops for token in asked.output]
        assert not any(ends[:-1])
        if asked.finish is not None:
            is_last = len(asked.output) == asked.sampling.max_tokens
            assert asked.finish is (FinishReason.STOP if ends[-1] else FinishReason.LENGTH)
            assert ends[-1] or is_last


def test_decodes_run_ahead_and_a_next_turn_starts_from_where_they_ended() -> None:
    """The step after a stop was launched already: it must have written nothing."""
    for seed in range(20):
        engine = Engine(random.Random(seed), num_units=40)
        first = engine.add([1, 2, 3 + seed, 4], max_tokens=80)
        engine.run()
        engine.check(first)
        asked = engine.asked[first]
        assert asked.finish is FinishReason.STOP
        assert engine.device.num_ahead == len(asked.output)  # one more than were needed
        # Its last state and block are kept, and read again.
        following = engine.add([*asked.prompt, *asked.output, 5], max_tokens=5)
        engine.run()
        engine.check(following)
        assert engine.scheduler.stats.checkpoint_hits == 1


def test_an_abort_waits_for_the_step_that_runs_ahead() -> None:
    """Its blocks and its state are kept for others: nothing may be written there any more."""
    for seed in range(10):
        engine = Engine(random.Random(seed), num_units=40)
        first = engine.add([1, 2, 3 + seed, 4], max_tokens=80)
        for _ in range(4):
            engine.step()
        engine.abort(first)
        asked = engine.asked[first]
        following = engine.add([*asked.prompt, *asked.output, 5], max_tokens=5)
        engine.run()
        engine.check(following)


def test_who_waits_joins_the_next_step_that_is_not_launched_yet() -> None:
    engine = Engine(random.Random(0), num_units=40)
    engine.add([1, 2, 4, 4], max_tokens=80, ignore_eos=True)
    for _ in range(4):
        engine.step()
    second = engine.add([5, 6], max_tokens=5)
    for _ in range(2):
        engine.step()
    assert engine.asked[second].output


def test_what_needs_the_token_itself_does_not_run_ahead() -> None:
    engine = Engine(random.Random(0), num_units=40)
    for params in (
        {"repetition_penalty": 1.1},
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"bad_words": (BadWord((5,)),)},
        {"min_tokens": 5},
        {"stop_token_ids": tuple(range(40, 60))},
    ):
        engine.add([1, 2, 9], max_tokens=5, **params)
        engine.run()
    assert engine.device.num_ahead == 0


@pytest.mark.parametrize("seed", everyday(range(300), range(12)))
def test_any_mix_of_requests_says_what_a_model_without_a_cache_says(seed: int) -> None:
    """Arrivals, aborts, stops, shared prefixes, checkpoints, a full arena: all at once."""
    draw = random.Random(seed)
    engine = Engine(draw, num_units=draw.choice((12, 20, 60)), interval=draw.choice((0, 3, 8)))
    prefixes = [[draw.randrange(VOCAB) for _ in range(draw.randrange(1, 30))] for _ in range(3)]
    names: list[str] = []
    for _ in range(120):
        event = draw.random()
        if event < 0.15 and len(names) < 14:
            prompt = draw.choice(prefixes)[: draw.randrange(1, 30)]
            prompt = [*prompt, *(draw.randrange(VOCAB) for _ in range(draw.randrange(1, 6)))]
            known = [one for one in engine.asked.values() if one.finish is not None]
            if known and draw.random() < 0.4:
                one = draw.choice(known)
                prompt = [*one.prompt, *one.output, draw.randrange(VOCAB)]
            stops = tuple(draw.sample(range(VOCAB), draw.choice((0, 0, 2))))
            tokens = draw.choice((1, 2, 7, 25))
            names.append(engine.add(prompt[:60], max_tokens=tokens, stop_token_ids=stops))
        elif event < 0.18 and names:
            engine.abort(draw.choice(names))
        else:
            engine.step()
    engine.run()
    for name in names:
        engine.check(name)
