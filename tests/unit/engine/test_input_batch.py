"""How a step's requests become one batch, where several groups must agree on one order."""

import torch

from engine.forward import StateIndex
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import MambaSpec, StatePart, form_groups
from engine.step import SamplingInput, ScheduledRequest
from engine.types import SamplingParams
from engine.worker.input_batch import InputBatcher

SMALL = MambaSpec("mamba2", (StatePart((3, 64)), StatePart((2, 16, 16))))
LARGE = MambaSpec("mamba2", (StatePart((3, 96)), StatePart((4, 16, 16))))
PLAN = plan_arena(form_groups(((SMALL,), (LARGE,))), 16, 1 << 20)


def decode(small: int, large: int) -> ScheduledRequest:
    """One token of a request with these two states."""
    return ScheduledRequest("r", (5,), 0, ([small], [large]), SamplingInput(SamplingParams(), 1))


def runs_of(*decodes: ScheduledRequest) -> list[slice | None]:
    """The run of consecutive states of each group."""
    batcher = InputBatcher(PLAN, torch.device("cpu"))
    index = batcher.build(batcher.order(decodes)).group_index
    return [group.decode_run for group in index if isinstance(group, StateIndex)]


def test_decodes_are_ordered_by_the_first_group_s_states() -> None:
    assert runs_of(decode(3, 6), decode(2, 5), decode(4, 7)) == [slice(2, 5), slice(5, 8)]
    assert runs_of(decode(3, 6), decode(2, 5), decode(5, 8)) == [None, None]


def test_a_group_whose_states_stand_in_another_order_has_no_run() -> None:
    """The batch is ordered by one group; in others, first and last may only look like a run."""
    assert runs_of(decode(0, 5), decode(1, 9), decode(2, 7)) == [slice(0, 3), None]
    assert runs_of(decode(0, 6), decode(1, 5), decode(2, 8)) == [slice(0, 3), None]
