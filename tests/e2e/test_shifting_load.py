"""Many short chats, then few long prompts, then chats again: every phase fills the same memory."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest
import torch

from engine.families.registry import read_config
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.models.loader import load_model
from engine.types import FinishReason, GenerateRequest
from tests.e2e.test_prefix_cache import request_of
from tests.support.nodes.bare_engine import BareEngine
from tests.support.nodes.pairs import prompt_of
from tests.tiers import everyday

UNITS = 200
TOKENS_PER_STEP = 1024
AT_ONCE = 200  # more than fit
STEADY_STEPS = 8


@dataclass(slots=True)
class Phase:
    """Endless equal requests, so many waiting, and the most in use while they ran alone."""

    prompt: int
    answer: int
    num_queued: int
    usage: float = 0.0
    at_once: int = 0

    def requests(self) -> Iterator[GenerateRequest]:
        for number in count():
            prompt = prompt_of(self.prompt, salt=11 * number)
            yield request_of(prompt, max_tokens=self.answer)

    def most_at_once(self, plan: ArenaPlan) -> int:
        """How many of them the arena holds when only their last units are partly filled."""
        blocks = [plan.blocks_for(g, self.prompt + self.answer) for g in range(len(plan.groups))]
        shares = [n / per for n, per in zip(blocks, plan.blocks_per_unit, strict=True)]
        return int(plan.num_units / sum(shares))

    def run(self, engine: BareEngine) -> None:
        """Runs without a pause after the phase before, whose requests still run and wait."""
        requests, mine, steps_alone = self.requests(), set[str](), 0
        while steps_alone < STEADY_STEPS:
            while engine.scheduler.num_waiting < self.num_queued:
                mine.add(engine.add(next(requests)))
            engine.step()
            if engine.running <= mine:
                steps_alone += 1
                self.usage = max(self.usage, engine.usage)
                self.at_once = max(self.at_once, len(engine.running))


@pytest.mark.parametrize("family", everyday(("qwen3_5", "nemotron_h"), ("nemotron_h",)))
def test_short_chats_and_long_prompts_use_all_units_in_turn(
    checkpoints: dict[str, Path], family: str
) -> None:
    config = read_config(checkpoints[family])
    unit_bytes = plan_arena(config.groups, 16, 1 << 30).unit_bytes
    plan = plan_arena(config.groups, 16, UNITS * unit_bytes)
    model = load_model(checkpoints[family], config, torch.device("cpu"))
    phases = Phase(10, 6, 100), Phase(380, 20, 10), Phase(10, 6, 100)
    with BareEngine(
        model, plan, max_num_seqs=AT_ONCE, max_num_batched_tokens=TOKENS_PER_STEP
    ) as engine:
        for phase in phases:
            phase.run(engine)
        engine.generate()
    assert all(done.last.finish_reason is FinishReason.LENGTH for done in engine.done.values())
    for phase in phases:
        assert phase.usage >= 0.95, phases
        assert phase.at_once >= 0.95 * phase.most_at_once(plan), phases
