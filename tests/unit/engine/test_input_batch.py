"""How a step's requests become one batch, where several groups must agree on one order."""

import pytest
import torch
from msgspec import structs

from engine.forward import StateIndex
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import MambaSpec, StatePart, form_groups
from engine.step import MAX_STOPS, UNKNOWN_TOKEN, SamplingInput, ScheduledRequest
from engine.types import SamplingParams
from engine.worker.decode_graphs import DecodeInputs
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


@pytest.mark.parametrize("sampling", [(True, True), (False, True), (False, False)])
def test_inputs_of_a_recording_are_those_of_a_new_batch(sampling: tuple[bool, ...]) -> None:
    """Also where a chunk of one token ends before the last token of its prompt."""
    batcher = InputBatcher(PLAN, torch.device("cpu"))
    inputs = DecodeInputs(batcher, rows=2, longest=16)
    inputs.fill([decode(7, 8), decode(8, 9)], {})
    items = (decode(3, 6), decode(4, 7))
    ordered = [
        structs.replace(item, sampling=item.sampling if samples else None)
        for item, samples in zip(items, sampling, strict=True)
    ]
    rows, batch = inputs.fill(ordered, {}), inputs.batch()
    expected = batcher.build(ordered)
    assert torch.equal(batch.token_ids, expected.token_ids)
    assert torch.equal(batch.positions, expected.positions)
    assert torch.equal(rows, expected.logits_rows)
    for filled, built in zip(batch.group_index, expected.group_index, strict=True):
        assert isinstance(filled, StateIndex) and isinstance(built, StateIndex)
        assert torch.equal(filled.units, built.units)
    assert torch.zeros(2, 4)[rows].shape == (sum(sampling), 4)


def test_rows_that_ended_and_rows_of_padding_name_no_unit() -> None:
    """A step ahead: one goes on with the token chosen, one ended by a stop, one has failed."""
    batcher, chosen = InputBatcher(PLAN, torch.device("cpu")), torch.tensor([17, 9, 30, -1])
    inputs = DecodeInputs(batcher, rows=6, longest=16, chosen=chosen)
    plain, *ahead = (
        structs.replace(decode(unit, unit), request_id=name, num_computed_tokens=7)
        for name, unit in (("plain", 1), ("goes on", 2), ("stopped", 3), ("failed", 4))
    )
    stops = tuple(range(5, 5 + MAX_STOPS))  # none is left to stand for a row that failed
    ahead = [structs.replace(item, token_ids=(UNKNOWN_TOKEN,), stops=stops) for item in ahead]
    rows = inputs.fill([plain, *ahead], {"stopped": 1, "goes on": 2, "failed": 3})
    batch = inputs.batch()
    assert rows.tolist() == [0, 1, 2, 3]
    assert batch.token_ids.tolist() == [5, 30, 9, 0, 0, 0]
    assert batch.positions.tolist() == [7, 7, 6, 6, 0, 0]
    for group in batch.group_index:
        assert isinstance(group, StateIndex)
        assert group.units.tolist() == [1, 2, -1, -1, -1, -1]
