"""benchmarks.onoff: what a step may move at most, beside conversations that share a beginning."""

import pytest

from benchmarks.onoff.__main__ import OFF, SKIP, check
from benchmarks.onoff.conversations import Round, Step

PER_TOKEN = 32_768
BLOCK = 16
STATE = 5_000


def step_of(prompt: int, new: int, *, hit: int, moved: int) -> Step:
    return Step(0.1, 0.01, prompt, new, (1, 2), moved * PER_TOKEN, STATE, hit)


def round_of(*steps: Step) -> dict[str, list[Round]]:
    return {SKIP: [Round(steps, 1.0, 0.5)], OFF: [Round(steps, 1.0, 0.5)]}


def test_the_first_conversation_may_find_the_shared_beginning_on_d() -> None:
    first = step_of(192, 192, hit=64, moved=128)
    check(round_of(first, step_of(328, 136, hit=192, moved=136 + BLOCK // 2)))


def test_a_step_that_moves_more_than_its_new_tokens_is_refused() -> None:
    first = step_of(192, 192, hit=64, moved=128)
    with pytest.raises(RuntimeError, match="at most"):
        check(round_of(first, step_of(328, 136, hit=160, moved=136 + 2 * BLOCK)))
