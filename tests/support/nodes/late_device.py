"""A runner whose device works late: steps are queued, and run when their results are read.

It keeps tokens instead of K/V and a sum over tokens instead of a state, in blocks and units that
are handed out by a real scheduler. What it chooses is a function of all that it reads, so a byte
that is written too late, too early or by somebody else ends in another token.
"""

import random
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec, SlidingWindowSpec
from engine.kv_cache.tables import NULL_BLOCK
from engine.step import ModelRunnerOutput, SampledToken, ScheduledRequest, SchedulerOutput
from engine.worker.model_runner import StepResults

FACTOR, MODULUS = 1_000_003, (1 << 61) - 1


def state_after(tokens: Sequence[int], state: int = 0) -> int:
    """The state that a recurrent group has after `tokens`."""
    for token in tokens:
        state = (state * FACTOR + token + 1) % MODULUS
    return state


def choice(read: Sequence[int], vocab_size: int) -> int:
    """The token that follows all that was read."""
    return state_after(read) % vocab_size


def expected_choice(plan: ArenaPlan, tokens: Sequence[int], vocab_size: int) -> int:
    """The same from the tokens themselves, for a model without a cache."""
    read: list[int] = []
    for group in plan.groups:
        if isinstance(group.spec, MambaSpec):
            read.append(state_after(tokens))
        else:
            read += tokens[_first(group.spec, len(tokens)) :]
    return choice(read, vocab_size)


def _first(spec: object, end: int) -> int:
    """The first token that the last of `end` tokens reads."""
    return spec.first_needed(end - 1) if isinstance(spec, SlidingWindowSpec) else 0


class LateDevice:
    """In place of a `ModelRunner`; `draw` says how much of what is queued runs before it must."""

    def __init__(self, plan: ArenaPlan, vocab_size: int, draw: random.Random) -> None:
        self.num_ahead = 0
        self._plan = plan
        self._vocab_size = vocab_size
        self._draw = draw
        self._memory: dict[tuple[int, int], list[int] | int] = {}
        self._queue: deque[Callable[[], None]] = deque()
        self._chosen: dict[str, int] = {}  # by the last step that ran

    def prepare(self, output: SchedulerOutput) -> None:
        self._queue.append(partial(self._prepare, output))

    def launch(self, output: SchedulerOutput) -> StepResults:
        if not output.scheduled:
            return StepResults(ModelRunnerOutput)
        result = ModelRunnerOutput()
        # Tables are the scheduler's own: a step's kernels get what they say now.
        tables = [[list(table) for table in item.tables] for item in output.scheduled]
        self._queue.append(partial(self._run, output.scheduled, tables, result))
        self.num_ahead += output.scheduled[0].is_ahead
        for _ in range(self._draw.choice((0, 0, 1, len(self._queue)))):
            self._queue.popleft()()
        return StepResults(partial(self._read, result), True)

    def _read(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        # All before it in the queue has to run; what was launched after it need not.
        while not result.sampled and self._queue:
            self._queue.popleft()()
        return result

    def _prepare(self, output: SchedulerOutput) -> None:
        for place in output.new_states:
            self._memory[place] = 0
        for group, source, target in output.copies:
            kept = self._memory[group, source]
            self._memory[group, target] = kept if isinstance(kept, int) else list(kept)

    def _run(
        self,
        scheduled: Sequence[ScheduledRequest],
        tables: Sequence[list[list[int]]],
        result: ModelRunnerOutput,
    ) -> None:
        chosen = {}
        for item, own in zip(scheduled, tables, strict=True):
            token_ids = list(item.token_ids)
            if item.is_ahead:
                token_ids = [self._chosen[item.request_id]]
                if token_ids[0] in item.stops:  # padding: nothing is written
                    chosen[item.request_id] = 0
                    continue
            for place, token in enumerate(token_ids):
                self._take(own, item.num_computed_tokens + place, token)
                for save in item.saves:
                    if save.num_tokens == item.num_computed_tokens + place + 1:
                        for group, target in save.states.items():
                            self._memory[group, target] = self._memory[group, own[group][0]]
            chosen[item.request_id] = choice(self._reads(own, item.end), self._vocab_size)
        self._chosen = chosen
        names = [item.request_id for item in scheduled if item.sampling is not None]
        result.sampled.update({name: SampledToken(chosen[name], None) for name in names})
        # A chunk inside of a prompt samples nothing: it too must be seen to have run.
        result.sampled.setdefault("", SampledToken(0, None))

    def _take(self, own: Sequence[Sequence[int]], position: int, token: int) -> None:
        """Writes one token's K/V, and moves the states on."""
        for number, group in enumerate(self._plan.groups):
            if isinstance(group.spec, MambaSpec):
                unit = number, own[number][0]
                before = self._memory[unit]
                assert isinstance(before, int)
                self._memory[unit] = state_after([token], before)
                continue
            size = self._plan.block_size_of(number)
            block = own[number][position // size]
            kept = self._memory.setdefault((number, block), [-1] * size)
            assert isinstance(kept, list)
            kept[position % size] = token

    def _reads(self, own: Sequence[Sequence[int]], end: int) -> list[int]:
        """All that the last of `end` tokens reads."""
        read: list[int] = []
        for number, group in enumerate(self._plan.groups):
            if isinstance(group.spec, MambaSpec):
                state = self._memory[number, own[number][0]]
                assert isinstance(state, int)
                read.append(state)
                continue
            size = self._plan.block_size_of(number)
            for position in range(_first(group.spec, end), end):
                block = own[number][position // size]
                assert block != NULL_BLOCK
                kept = self._memory[number, block]
                assert isinstance(kept, list)
                read.append(kept[position % size])
        return read
