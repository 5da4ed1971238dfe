"""One step's work list as tensors: the only translation from block ids to rows of the arena.

    requests     | decode | decode |  prefill chunk   | prefill |    decodes first, by state
    token_ids    |   t    |   t    |  t  t  t  t  t   |  t   t  |    packed, no padding
    logits_rows      0        1                    6         8       last tokens, where sampled

Knows the plan, but no weights.
"""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import add

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.forward import (
    AttentionIndex,
    ForwardBatch,
    SequenceLens,
    StateExport,
    StateIndex,
)
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec
from engine.step import ScheduledRequest
from engine.worker.kv_caches import page_row

IntArray = NDArray[np.int64]


class GroupPages:
    """The places of an attention group's blocks: `rows` [blocks] of pages, computed once."""

    def __init__(self, plan: ArenaPlan, group: int) -> None:
        spec = plan.groups[group].spec
        assert not isinstance(spec, MambaSpec)
        self.block_size = plan.block_size_of(group)
        count = plan.num_units * plan.blocks_per_unit[group]
        rows = (page_row(plan, group, block) for block in range(count))
        self.rows = np.fromiter(rows, np.int64, count)
        self.num_kv_heads = spec.num_kv_heads
        self._heads = np.arange(spec.num_kv_heads, dtype=np.int64) * self.block_size

    def slots(self, rows: IntArray, positions: IntArray) -> IntArray:
        """Rows of `AttentionCache.k_tokens` [tokens, heads], of tokens in pages `rows` [tokens]."""
        # A page is [head, token of the block]: one token's heads are `block_size` rows apart.
        #
        #   page row r, place p    head 0: (r * heads + 0) * block_size + p
        #                          head 1: (r * heads + 1) * block_size + p
        first = rows * (self.num_kv_heads * self.block_size) + positions % self.block_size
        slots: IntArray = first[:, None] + self._heads
        return slots


class InputBatcher:
    """Builds ForwardBatches."""

    def __init__(self, plan: ArenaPlan, device: torch.device) -> None:
        self._plan = plan
        self.device = device
        self._pages = {group: GroupPages(plan, group) for group in plan.attention_groups}
        self._state_groups = plan.state_groups

    def pages_of_groups(self) -> Iterable[tuple[int, GroupPages | None]]:
        """The pages of each KV cache group, None of one of states."""
        return ((group, self._pages.get(group)) for group in range(len(self._plan.groups)))

    def order(self, scheduled: Sequence[ScheduledRequest]) -> list[ScheduledRequest]:
        """Sorts decodes first, then by state unit: neighbours in the arena stay neighbours."""
        return sorted(scheduled, key=self._place)

    def build(self, ordered: Sequence[ScheduledRequest]) -> ForwardBatch:
        """The packed batch of `ordered` (decodes first)."""
        query_lens = [len(item.token_ids) for item in ordered]
        context_lens = [item.num_computed_tokens for item in ordered]
        lens = SequenceLens(query_lens.count(1), query_lens, context_lens)
        places, ends = _positions(lens), np.cumsum(query_lens, dtype=np.int64)
        positions = self.tensor(places)
        token_ids = chain.from_iterable(item.token_ids for item in ordered)
        indexes = (
            self._state_index(group, ordered, lens)
            if group in self._state_groups
            else self._attention_index(group, ordered, lens, positions=(places, positions))
            for group in range(len(self._plan.groups))
        )
        return ForwardBatch(
            token_ids=self.tensor(np.fromiter(token_ids, np.int64, sum(query_lens))),
            positions=positions,
            lens=lens,
            group_index=tuple(indexes),
            logits_rows=self.tensor(ends[[item.sampling is not None for item in ordered]] - 1),
        )

    def _place(self, item: ScheduledRequest) -> tuple[bool, int]:
        state = item.tables[self._state_groups[0]][0] if self._state_groups else 0
        return len(item.token_ids) != 1, state

    def _state_index(
        self, group: int, ordered: Sequence[ScheduledRequest], lens: SequenceLens
    ) -> StateIndex:
        units = [item.tables[group][0] for item in ordered]
        # Consecutive decodes are a slice; `order` sorts by the first group only.
        decodes = units[: lens.num_decodes]
        run = slice(decodes[0], decodes[0] + len(decodes)) if decodes else None
        if run is not None and decodes != list(range(run.start, run.stop)):
            run = None
        exports = _state_exports(group, ordered[lens.num_decodes :])
        return StateIndex(self.tensor(np.asarray(units, np.int64)), run, lens, exports)

    def _attention_index(
        self,
        group: int,
        ordered: Sequence[ScheduledRequest],
        lens: SequenceLens,
        *,
        positions: tuple[IntArray, Tensor],
    ) -> AttentionIndex:
        """`positions`: those of the batch's tokens, here and on the device."""
        places, positions_there = positions
        pages = self._pages[group]
        # Blocks up to this step's last token; shorter tables are padded with block 0, which no
        # sequence length reaches.
        ends = map(add, lens.context_lens, lens.query_lens)
        counts = [-(-end // pages.block_size) for end in ends]
        padded = np.zeros((len(ordered), max(counts)), np.int64)
        for row, (item, count) in enumerate(zip(ordered, counts, strict=True)):
            padded[row, :count] = item.tables[group][:count]
        block_tables = pages.rows[padded]
        sequence = np.repeat(np.arange(len(ordered)), lens.query_lens)
        rows = block_tables[sequence, places // pages.block_size]
        slots = self.tensor(pages.slots(rows, places).reshape(-1))
        return AttentionIndex(self.tensor(block_tables), slots, positions_there, lens)

    def tensor(self, values: IntArray) -> Tensor:
        """The same numbers on the device; the copy is queued."""
        host = torch.from_numpy(values)
        if self.device.type == "cpu":
            return host
        # From pinned memory the copy is queued on the stream, and the host goes on at once.
        return host.pin_memory().to(self.device, non_blocking=True)


def _positions(lens: SequenceLens) -> IntArray:
    # Of decodes alone: each one's token comes right after its context.
    if lens.num_decodes == len(lens.query_lens):
        return np.asarray(lens.context_lens, np.int64)
    runs = [
        np.arange(start, start + length, dtype=np.int64)
        for start, length in zip(lens.context_lens, lens.query_lens, strict=True)
    ]
    return np.concatenate(runs)


def _state_exports(group: int, segments: Sequence[ScheduledRequest]) -> tuple[StateExport, ...]:
    """Checkpoints inside prefill segments; those at a segment's end are copied afterwards."""
    return tuple(
        StateExport(
            index,
            save.num_tokens - item.num_computed_tokens,
            save.states[group],
        )
        for index, item in enumerate(segments)
        for save in item.saves
        if save.num_tokens < item.end
    )
