"""Steps of decodes only, recorded once for each batch size and replayed, as with CUDA graphs.

A small model's forward pass is a hundred short kernels: to call them one by one from Python takes
longer than they do. A replay is one call; only the inputs are written to where the kernels look.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.forward import AttentionIndex, ForwardBatch, SequenceLens, StateIndex
from engine.native.kernels import Kernels
from engine.native.recording import Recording
from engine.step import ScheduledRequest
from engine.worker.input_batch import GroupPages, InputBatcher, IntArray

SHORTEST = 256
"""Tokens of context that the first recording of a batch size has room for."""

TRIES = 2
"""In a row: torch may build longer rotary tables in the first, and the second finds them."""

log = structlog.get_logger()


class _Units:
    """Where the kernels look for the units of a state group."""

    def __init__(self, group: int, rows: int) -> None:
        self._group = group
        self._units = np.zeros(rows, np.int64)

    def fill(self, ordered: Sequence[ScheduledRequest], _positions: IntArray) -> None:
        self._units[:] = [item.tables[self._group][0] for item in ordered]

    def index(self, _positions: Tensor, lens: SequenceLens) -> StateIndex:
        return StateIndex(torch.from_numpy(self._units), None, lens)


class _Tables:
    """Where the kernels look for the pages of an attention group."""

    def __init__(self, group: int, pages: GroupPages, *, rows: int, longest: int) -> None:
        self._group = group
        self._pages = pages
        self._tables = np.zeros((rows, -(-longest // pages.block_size)), np.int64)
        self._slots = np.zeros((rows, pages.num_kv_heads), np.int64)
        self._blocks: list[Sequence[int]] = [()] * rows  # in the tables

    def fill(self, ordered: Sequence[ScheduledRequest], positions: IntArray) -> None:
        last = []
        for row, (item, position) in enumerate(zip(ordered, positions.tolist(), strict=True)):
            blocks = item.tables[self._group][: position // self._pages.block_size + 1]
            # Mostly those of the step before. What is left after them is unread.
            if blocks != self._blocks[row]:
                self._tables[row, : len(blocks)] = self._pages.rows[blocks]
                self._blocks[row] = blocks
            last.append(blocks[-1])
        self._slots[:] = self._pages.slots(self._pages.rows[last], positions)

    def index(self, positions: Tensor, lens: SequenceLens) -> AttentionIndex:
        tables, slots = torch.from_numpy(self._tables), torch.from_numpy(self._slots)
        return AttentionIndex(tables, slots.view(-1), positions, lens)


class DecodeInputs:
    """A batch of `rows` decodes whose tensors stay, with tables for `longest` tokens.

    NumPy writes them: between two replays the processor's caches are cold, and each function that
    takes part costs more than the numbers it moves.
    """

    def __init__(self, batcher: InputBatcher, rows: int, longest: int) -> None:
        # The longest context that may come: who sizes a table by it need not do so again.
        self.longest = longest
        self._token_ids, self._positions = np.zeros(rows, np.int64), np.zeros(rows, np.int64)
        self._groups = tuple(
            _Units(group, rows)
            if pages is None
            else _Tables(group, pages, rows=rows, longest=longest)
            for group, pages in batcher.pages_of_groups()
        )
        lens = SequenceLens(rows, [1] * rows, [longest - 1] * rows)
        positions = torch.from_numpy(self._positions)
        self._all_rows = torch.arange(rows)
        self.batch = ForwardBatch(
            token_ids=torch.from_numpy(self._token_ids),
            positions=positions,
            lens=lens,
            group_index=tuple(group.index(positions, lens) for group in self._groups),
            logits_rows=self._all_rows,
        )

    def fill(self, ordered: Sequence[ScheduledRequest]) -> None:
        """Writes this step's numbers over those of the last one."""
        self._token_ids[:] = [item.token_ids[0] for item in ordered]
        self._positions[:] = [item.num_computed_tokens for item in ordered]
        for group in self._groups:
            group.fill(ordered, self._positions)
        rows = [row for row, item in enumerate(ordered) if item.sampling is not None]
        all_sample = len(rows) == len(ordered)
        self.batch.logits_rows = (
            self._all_rows if all_sample else torch.tensor(rows, dtype=torch.int64)
        )


@dataclass(slots=True, frozen=True)
class _Graph:
    """A recorded pass over `inputs`, which writes `hidden`."""

    inputs: DecodeInputs
    recording: Recording
    hidden: Tensor


class DecodeGraphs:
    """The recordings of one model on one arena."""

    def __init__(
        self,
        kernels: Kernels,
        batcher: InputBatcher,
        forward: Callable[[ForwardBatch], Tensor],
    ) -> None:
        self._kernels = kernels
        self._batcher = batcher
        self._forward = forward
        self._graphs: dict[int, _Graph] = {}
        self._failures = 0

    def run(self, ordered: Sequence[ScheduledRequest]) -> tuple[Tensor, Tensor] | None:
        """Hidden states [rows, hidden], until the next step, and the rows whose logits are wanted.

        None if `ordered` are not decodes only, or if their steps cannot be recorded.
        """
        if self._failures == TRIES or len(ordered[-1].token_ids) != 1:
            return None
        needed = max(item.end for item in ordered)
        graph = self._graphs.get(len(ordered))
        if graph is None or graph.inputs.longest < needed:
            return self._record(ordered, needed)
        graph.inputs.fill(ordered)
        graph.recording.replay()
        return graph.hidden, graph.inputs.batch.logits_rows

    def _record(self, ordered: Sequence[ScheduledRequest], needed: int) -> tuple[Tensor, Tensor]:
        # Room for twice as many tokens, so that growing sequences are recorded a few times only.
        longest = SHORTEST
        while longest < needed:
            longest *= 2
        inputs = DecodeInputs(self._batcher, len(ordered), longest)
        inputs.fill(ordered)
        recording, hidden = self._kernels.record(lambda: self._forward(inputs.batch))
        if recording is not None:
            self._graphs[len(ordered)] = _Graph(inputs, recording, hidden)
            self._failures = 0
        else:
            self._failures += 1
            if self._failures == TRIES:
                log.info("decode steps are not recorded", torch_computes=self._kernels.torch_work)
        return hidden, inputs.batch.logits_rows
