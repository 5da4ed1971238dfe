"""Steps of decodes only, recorded once for each batch size and replayed, as with CUDA graphs.

To call a step's kernels one by one from Python takes longer than they do. A replay is one call;
only the inputs are written to where the kernels look.

On a device a recording has room for more rows than its step may have: what is left over is padding,
for which kernels write nothing. And it may run one step ahead: then the host does not know a row's
token yet, and the device takes it from the choices of the step before.

    tokens chosen   row 0: 17   row 1: 2, which ends it   row 2: 40
                        |           |                         |
    sources             0           1                         2          -1 (padding)
    next step        token 17    unit -1, slots -1         token 40       unit -1, slots -1
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.forward import AttentionIndex, ForwardBatch, SequenceLens, StateIndex
from engine.ops.backend import Recorder, Replay
from engine.step import MAX_STOPS, ScheduledRequest
from engine.worker.input_batch import GroupPages, InputBatcher, IntArray

SHORTEST = 256
"""Tokens of context that the first recording of a batch size has room for."""
SHORTEST_PADDED = 4096
"""The same where a recording takes a second, and its tables are copied with one call."""

MAX_ROWS = 1024
"""Of a step whose tokens the next one may take over before the host has read them."""

TRIES = 2
"""In a row: torch may build longer rotary tables in the first, and the second finds them."""

log = structlog.get_logger()


class StaticTensors:
    """int64 tensors in places that stay: NumPy writes `here`, the kernels read `there`.

    On a CPU both are the same memory.
    """

    def __init__(self, shapes: Sequence[tuple[int, ...]], device: torch.device) -> None:
        sizes = list(map(prod, shapes))
        memory = np.zeros(sum(sizes), np.int64)
        parts = np.split(memory, np.cumsum(sizes)[:-1])
        self.here = [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]
        self._here = self._there = torch.from_numpy(memory)
        self._buffers: deque[Tensor] = deque()
        if device.type != "cpu":
            self._there = torch.zeros(len(memory), dtype=torch.int64, device=device)
            # Two: the copy of the step before may still wait for the step that runs.
            self._buffers.extend(self._here.pin_memory() for _ in range(2))
        there = self._there.split_with_sizes(sizes)
        self.there = [part.view(shape) for part, shape in zip(there, shapes, strict=True)]

    def send(self) -> None:
        """Queues one copy of all that was written to the device."""
        if self._buffers:
            self._buffers.rotate()
            self._there.copy_(self._buffers[0].copy_(self._here), non_blocking=True)


class _Units:
    """Where the kernels look for the units of a state group."""

    def __init__(self, group: int, rows: int) -> None:
        self._group = group
        self.shapes = [(rows,)]

    def fill(
        self, ordered: Sequence[ScheduledRequest], _positions: IntArray, parts: list[IntArray]
    ) -> None:
        (units,) = parts
        units[: len(ordered)] = [item.tables[self._group][0] for item in ordered]
        units[len(ordered) :] = -1

    def index(
        self, parts: list[Tensor], _positions: Tensor, ended: Tensor | None, *, lens: SequenceLens
    ) -> StateIndex:
        (units,) = parts
        return StateIndex(units if ended is None else units.masked_fill(ended, -1), None, lens)


class _Tables:
    """Where the kernels look for the pages of an attention group."""

    def __init__(self, group: int, pages: GroupPages, *, rows: int, longest: int) -> None:
        self._group = group
        self._pages = pages
        self.shapes = [(rows, -(-longest // pages.block_size)), (rows, pages.num_kv_heads)]
        self._blocks: list[Sequence[int]] = [()] * rows  # in the tables

    def fill(
        self, ordered: Sequence[ScheduledRequest], positions: IntArray, parts: list[IntArray]
    ) -> None:
        tables, slots = parts
        last, count = [], len(ordered)
        for row, (item, position) in enumerate(
            zip(ordered, positions[:count].tolist(), strict=True)
        ):
            blocks = item.tables[self._group][: position // self._pages.block_size + 1]
            # Mostly those of the step before. What is left after them is unread.
            if blocks != self._blocks[row]:
                tables[row, : len(blocks)] = self._pages.rows[blocks]
                self._blocks[row] = blocks
            last.append(blocks[-1])
        slots[:count] = self._pages.slots(self._pages.rows[last], positions[:count])
        slots[count:] = -1

    def index(
        self, parts: list[Tensor], positions: Tensor, ended: Tensor | None, *, lens: SequenceLens
    ) -> AttentionIndex:
        tables, slots = parts
        if ended is not None:
            slots = slots.masked_fill(ended.unsqueeze(1), -1)
        return AttentionIndex(tables, slots.view(-1), positions, lens)


class DecodeInputs:
    """The inputs of at most `rows` decodes, in places that stay, with tables for `longest` tokens.

    At first all rows are padding. NumPy writes them: between two replays the processor's caches are
    cold, and each function that takes part costs more than the numbers it moves. `chosen`: int64
    [MAX_ROWS], the tokens of the step before, where steps run ahead.
    """

    def __init__(
        self, batcher: InputBatcher, rows: int, longest: int, *, chosen: Tensor | None = None
    ) -> None:
        # The longest context that may come: who sizes a table by it need not do so again.
        self.longest = longest
        self._batcher = batcher
        self._rows = rows
        self._chosen = chosen
        self._groups = tuple(
            _Units(group, rows)
            if pages is None
            else _Tables(group, pages, rows=rows, longest=longest)
            for group, pages in batcher.pages_of_groups()
        )
        shapes: list[tuple[int, ...]] = [(rows,), (rows,), (rows,), (rows, MAX_STOPS)]
        shapes += [shape for group in self._groups for shape in group.shapes]
        self._tensors = StaticTensors(shapes, batcher.device)
        self._all_rows = torch.arange(rows, device=batcher.device)
        if chosen is not None:
            self.fill([], {})

    def fill(self, ordered: Sequence[ScheduledRequest], chosen_at: Mapping[str, int]) -> Tensor:
        """Writes this step's numbers over those of the last one; the rows whose logits are wanted.

        `chosen_at`: the place of each request's token in `chosen`.
        """
        count = len(ordered)
        token_ids, positions, sources, stops, *parts = self._tensors.here
        token_ids[:count] = [item.token_ids[0] for item in ordered]
        positions[:count] = [item.num_computed_tokens for item in ordered]
        token_ids[count:] = positions[count:] = 0
        if self._chosen is not None:
            sources[:] = stops[:] = -1
            for row, item in enumerate(ordered):
                if item.is_ahead:
                    sources[row] = chosen_at[item.request_id]
                    stops[row, : len(item.stops)] = item.stops
        left = iter(parts)
        for group in self._groups:
            group.fill(ordered, positions, [next(left) for _ in group.shapes])
        self._tensors.send()
        rows = [row for row, item in enumerate(ordered) if item.sampling is not None]
        if len(rows) == count:
            return self._all_rows[:count]
        return self._batcher.tensor(np.asarray(rows, np.int64))

    def batch(self) -> ForwardBatch:
        """The kernels' view of it; where steps run ahead, made by kernels that are recorded too."""
        token_ids, positions, sources, stops, *parts = self._tensors.there
        ended: Tensor | None = None
        if self._chosen is not None:
            chosen = self._chosen[sources.clamp(min=0)]
            is_ahead = sources >= 0
            # -1 is no token: none could be chosen, and the request has failed.
            ended = (chosen < 0) | (chosen.unsqueeze(1) == stops).any(dim=1)
            ended &= is_ahead
            token_ids = torch.where(is_ahead, chosen.clamp(min=0), token_ids)
            # Up to the token before: the place of one that was never written may read as NaN.
            positions = positions - ended.to(positions.dtype)
        lens = SequenceLens(self._rows, [1] * self._rows, [self.longest - 1] * self._rows)
        left = iter(parts)
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            lens=lens,
            group_index=tuple(
                group.index([next(left) for _ in group.shapes], positions, ended, lens=lens)
                for group in self._groups
            ),
            logits_rows=self._all_rows,
        )


@dataclass(slots=True, frozen=True)
class _Graph:
    """A recorded pass over `inputs`, which writes `hidden`."""

    inputs: DecodeInputs
    recording: Replay
    hidden: Tensor


class DecodeGraphs:
    """The recordings of one model on one arena, and the tokens that the last step has chosen."""

    def __init__(
        self,
        recorder: Recorder,
        batcher: InputBatcher,
        forward: Callable[[ForwardBatch], Tensor],
    ) -> None:
        self._recorder = recorder
        self._batcher = batcher
        self._forward = forward
        self._graphs: dict[int, _Graph] = {}
        self._failures = 0
        self._chosen: Tensor | None = None
        if recorder.takes_padding:
            self._chosen = torch.zeros(MAX_ROWS, dtype=torch.int64, device=batcher.device)
        self._chosen_at: dict[str, int] = {}

    def run(self, ordered: Sequence[ScheduledRequest]) -> tuple[Tensor, Tensor] | None:
        """Hidden states [rows, hidden], until the next step, and the rows whose logits are wanted.

        None if `ordered` are not decodes only, or if their steps cannot be recorded.
        """
        if self._failures == TRIES or len(ordered[-1].token_ids) != 1:
            return None
        rows = len(ordered) if self._chosen is None else padded_rows(len(ordered))
        needed = max(item.end for item in ordered)
        graph = self._graphs.get(rows)
        if graph is None or graph.inputs.longest < needed:
            return self._record(ordered, rows, needed)
        wanted = graph.inputs.fill(ordered, self._chosen_at)
        graph.recording.replay()
        return graph.hidden[: len(ordered)], wanted

    def keep(self, tokens: Tensor, request_ids: Iterable[str]) -> bool:
        """Keeps what a step has chosen, int64 [requests], for a step that runs ahead.

        False where none can.
        """
        if self._chosen is None or self._failures == TRIES or len(tokens) > MAX_ROWS:
            return False
        self._chosen[: len(tokens)].copy_(tokens)
        self._chosen_at = {name: row for row, name in enumerate(request_ids)}
        return True

    def warm_up(self, max_rows: int) -> None:
        """Records all batch sizes, the largest first: smaller ones live in its memory."""
        if self._chosen is None:
            return
        for rows in sorted({padded_rows(count) for count in range(1, max_rows + 1)}, reverse=True):
            self._record([], rows, 1)

    def _record(
        self, ordered: Sequence[ScheduledRequest], rows: int, needed: int
    ) -> tuple[Tensor, Tensor]:
        # Room for twice as many tokens, so that growing sequences are recorded a few times only.
        longest = SHORTEST if self._chosen is None else SHORTEST_PADDED
        while longest < needed:
            longest *= 2
        inputs = DecodeInputs(self._batcher, rows, longest, chosen=self._chosen)
        if self._chosen is None:
            wanted = inputs.fill(ordered, self._chosen_at)
        # Where padding is allowed all rows are: such a pass may run as often as recording needs.
        recording, hidden = self._recorder.record(lambda: self._forward(inputs.batch()))
        if self._chosen is not None:
            wanted = inputs.fill(ordered, self._chosen_at)
            if recording is None:
                hidden = self._forward(inputs.batch())
            else:
                recording.replay()
        if recording is not None:
            self._graphs[rows] = _Graph(inputs, recording, hidden)
            self._failures = 0
        else:
            self._failures += 1
            if self._failures == TRIES:
                log.info("decode steps are not recorded", why=self._recorder.why_not)
        return hidden[: len(ordered)], wanted


def padded_rows(count: int) -> int:
    """The rows of the recording for `count` decodes: a power of two, from 8 on a multiple of 8."""
    return 1 << (count - 1).bit_length() if count <= 8 else -(-count // 8) * 8
