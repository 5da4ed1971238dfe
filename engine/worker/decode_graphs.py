"""Steps of decodes only, recorded once for each batch size and replayed, as with CUDA graphs.

A small model's forward pass is a hundred short kernels: to call them one by one from Python takes
longer than they do. A replay is one call; only the inputs are copied to where the kernels look.
"""

from collections.abc import Callable
from dataclasses import dataclass

import structlog
from torch import Tensor

from engine.forward import AttentionIndex, ForwardBatch, GroupIndex, SequenceLens, StateIndex
from engine.native.kernels import Kernels
from engine.native.recording import Recording

SHORTEST = 256
"""Tokens of context that the first recording of a batch size has room for."""

TRIES = 2
"""In a row: torch may build longer rotary tables in the first, and the second finds them."""

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class _Graph:
    """A recorded pass over `inputs`; it writes `hidden` and serves up to `longest` tokens."""

    inputs: ForwardBatch
    longest: int
    recording: Recording
    hidden: Tensor


class DecodeGraphs:
    """The recordings of one model on one arena."""

    def __init__(self, kernels: Kernels, forward: Callable[[ForwardBatch], Tensor]) -> None:
        self._kernels = kernels
        self._forward = forward
        self._graphs: dict[int, _Graph] = {}
        self._failures = 0

    def forward(self, batch: ForwardBatch) -> Tensor:
        """Hidden states [tokens, hidden] of any batch; those of decodes last until the next."""
        rows = batch.lens.num_decodes
        if rows != len(batch.lens.query_lens) or self._failures == TRIES:
            return self._forward(batch)
        needed = max(batch.lens.context_lens) + 1
        graph = self._graphs.get(rows)
        if graph is None or graph.longest < needed:
            return self._record(batch, needed)
        _fill(graph.inputs, batch)
        graph.recording.replay()
        return graph.hidden

    def _record(self, batch: ForwardBatch, needed: int) -> Tensor:
        # Room for twice as many tokens, so that growing sequences are recorded a few times only.
        longest = SHORTEST
        while longest < needed:
            longest *= 2
        inputs = _fixed(batch, longest, needed=needed)
        recording, hidden = self._kernels.record(lambda: self._forward(inputs))
        if recording is not None:
            self._graphs[batch.lens.num_decodes] = _Graph(inputs, longest, recording, hidden)
            self._failures = 0
            return hidden
        self._failures += 1
        if self._failures == TRIES:
            log.info("decode steps are not recorded", torch_computes=self._kernels.torch_work)
        return hidden


def _fixed(batch: ForwardBatch, longest: int, *, needed: int) -> ForwardBatch:
    """A copy of a batch of decodes whose tensors stay, with tables for `longest` tokens."""
    rows = batch.lens.num_decodes
    # The longest context that may come: who sizes a table by it need not do so again.
    lens = SequenceLens(rows, [1] * rows, [longest - 1] * rows)
    positions = batch.positions.clone()

    def fixed(index: GroupIndex) -> GroupIndex:
        if isinstance(index, StateIndex):
            return StateIndex(index.units.clone(), None, lens)
        # `width` blocks are enough for `needed` tokens.
        width = index.block_tables.shape[1]
        tables = index.block_tables.new_zeros((rows, -(-width * longest // needed)))
        tables[:, :width] = index.block_tables
        return AttentionIndex(tables, index.slot_mapping.clone(), positions, lens)

    return ForwardBatch(
        token_ids=batch.token_ids.clone(),
        positions=positions,
        lens=lens,
        group_index=tuple(map(fixed, batch.group_index)),
        logits_rows=batch.logits_rows,
    )


def _fill(inputs: ForwardBatch, batch: ForwardBatch) -> None:
    inputs.token_ids.copy_(batch.token_ids)
    inputs.positions.copy_(batch.positions)
    for fixed, index in zip(inputs.group_index, batch.group_index, strict=True):
        if isinstance(index, StateIndex):
            assert isinstance(fixed, StateIndex)
            fixed.units.copy_(index.units)
        else:
            assert isinstance(fixed, AttentionIndex)
            fixed.slot_mapping.copy_(index.slot_mapping)
            fixed.block_tables[:, : index.block_tables.shape[1]].copy_(index.block_tables)
