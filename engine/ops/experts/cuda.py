"""A mixture of experts as two grouped products in Triton; the host asks the device for nothing.

    pairs (token, choice)   t0:e2 t0:e0 t1:e2 t1:e1         pair = token * top_k + choice
    sorted by expert        t0:e0 | t1:e1 | t0:e2 t1:e2
    blocks of rows          |  0  |   1   |     2     | ...  the last of an expert may be part empty

How many blocks there are only the device knows. The grid has as many as there could be, and those
without rows leave at once.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model_configs.feed_forward import Activation

CHUNK = 128
"""Pairs that one program counts and sorts, or blocks that it describes."""

EXPERTS_AT_ONCE = 32
CHUNKS_AT_ONCE = 64
SUMS_AT_ONCE = 1024

STEP_BYTES = 128
"""Of a row in one step of the sums over inputs: the same in all tiles, so that sums are too."""


class Tile(NamedTuple):
    """Sizes of one program of a product, its warps, and the steps that it loads ahead.

    A warp group of Hopper multiplies 64 rows by one instruction. Fewer rows would take another one,
    which need not add in the same order, and would be no faster: a block's matrix must be read.
    """

    rows: int
    columns: int
    warps: int
    stages: int


FEW = Tile(rows=64, columns=64, warps=4, stages=4)
SOME = Tile(rows=64, columns=128, warps=4, stages=3)
MANY = Tile(rows=128, columns=128, warps=8, stages=3)


def tile_for(pairs: int, experts: int) -> Tile:
    """The tile of a number of pairs; it changes no bit of any row."""
    mean = pairs / experts
    if mean < FEW.rows / 2:
        return FEW
    return SOME if mean < 2 * MANY.rows else MANY


@triton.jit
def _count(chosen, counts, num_pairs, EXPERTS: tl.constexpr, CHUNK: tl.constexpr, AT: tl.constexpr):
    """Counts [chunk, expert]: pairs of one chunk, by expert."""
    chunk = tl.program_id(0)
    experts = tl.program_id(1) * AT + tl.arange(0, AT)
    pairs = chunk * CHUNK + tl.arange(0, CHUNK)
    own = tl.load(chosen + pairs, mask=pairs < num_pairs, other=-1).to(tl.int32)
    found = tl.sum((own[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(counts + chunk * EXPERTS + experts, found, mask=experts < EXPERTS)


@triton.jit
def _sort(
    chosen,
    counts,
    pairs_by_expert,
    blocks,
    num_pairs,
    num_chunks,
    num_blocks,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AT: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """The first programs sort a chunk of pairs each, the others describe a chunk of blocks.

    Blocks [3, block]: the expert, the place of its first row among the sorted pairs, its rows.
    """
    program = tl.program_id(0)
    lanes = tl.arange(0, CHUNK)
    pairs = program * CHUNK + lanes
    # Of the programs for blocks these are more than there are.
    of_chunk = pairs < num_pairs
    own = tl.load(chosen + pairs, mask=of_chunk, other=-1).to(tl.int32)
    block = (program - num_chunks) * CHUNK + lanes
    # Stable: pairs of the same expert before this one in the chunk.
    is_before = (own[:, None] == own[None, :]) & (lanes[None, :] < lanes[:, None])
    place = tl.sum(is_before.to(tl.int32), axis=1)
    expert_of = tl.full((CHUNK,), 0, tl.int32)
    first_of = tl.full((CHUNK,), 0, tl.int32)
    rows_of = tl.full((CHUNK,), 0, tl.int32)
    next_pair = program * 0
    next_block = program * 0
    for start in range(0, EXPERTS, AT):
        experts = start + tl.arange(0, AT)
        total = tl.full((AT,), 0, tl.int32)
        before = tl.full((AT,), 0, tl.int32)
        for first_chunk in range(0, num_chunks, CHUNKS):
            chunks = first_chunk + tl.arange(0, CHUNKS)
            known = (chunks[:, None] < num_chunks) & (experts[None, :] < EXPERTS)
            found = tl.load(counts + chunks[:, None] * EXPERTS + experts, mask=known, other=0)
            total += tl.sum(found, axis=0)
            before += tl.sum(tl.where(chunks[:, None] < program, found, 0), axis=0)
        first = next_pair + tl.cumsum(total, axis=0) - total
        next_pair += tl.sum(total, axis=0)
        if program < num_chunks:
            is_own = own[:, None] == experts[None, :]
            place += tl.sum(tl.where(is_own, (first + before)[None, :], 0), axis=1)
        else:
            needed = (total + ROWS - 1) // ROWS
            first_block = next_block + tl.cumsum(needed, axis=0) - needed
            next_block += tl.sum(needed, axis=0)
            done = (block[:, None] - first_block[None, :]) * ROWS
            is_of = (done >= 0) & (done < total[None, :])
            expert_of += tl.sum(tl.where(is_of, experts[None, :], 0), axis=1)
            first_of += tl.sum(tl.where(is_of, first[None, :] + done, 0), axis=1)
            rows_of += tl.sum(tl.where(is_of, tl.minimum(total[None, :] - done, ROWS), 0), axis=1)
    tl.store(pairs_by_expert + place, pairs, mask=of_chunk)
    is_block = (block >= 0) & (block < num_blocks)
    tl.store(blocks + block, expert_of, mask=is_block)
    tl.store(blocks + num_blocks + block, first_of, mask=is_block)
    tl.store(blocks + 2 * num_blocks + block, rows_of, mask=is_block)


@triton.jit
def _activated(x, KIND: tl.constexpr):
    if KIND == "relu2":
        x = tl.maximum(x, 0.0)
        y = x * x
    elif KIND == "silu":
        y = x / (1.0 + tl.exp(-x))
    else:
        # 0.5 * (1 + tanh(u)) is sigmoid(2 u).
        double = 1.5957691216057308 * (x + 0.044715 * x * x * x)
        y = x / (1.0 + tl.exp(-double))
    return y


@triton.jit
def _up(
    x,
    up,
    inner,
    pairs_by_expert,
    blocks,
    num_blocks,
    row_stride,
    top_k,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    KIND: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows of tokens times their expert's matrix, then the activation: inner [sorted pair, OUT]."""
    block = tl.program_id(1)
    num_rows = tl.load(blocks + 2 * num_blocks + block)
    if num_rows == 0:
        return
    expert = tl.load(blocks + block).to(tl.int64)
    places = tl.load(blocks + num_blocks + block) + tl.arange(0, ROWS)
    live = tl.arange(0, ROWS) < num_rows
    tokens = tl.load(pairs_by_expert + places, mask=live, other=0) // top_k
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < OUT
    steps = tl.arange(0, STEP)
    left = x + tokens.to(tl.int64)[:, None] * row_stride + steps[None, :]
    # Gates lie before the other half: row i of the matrix is the gate of row OUT + i.
    matrix = up + expert * (OUT * IN * (2 if GATED else 1))
    right = matrix + columns.to(tl.int64)[None, :] * IN + steps[:, None]
    sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    factors = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, IN, STEP):
        within = start + steps < IN
        rows = tl.load(left + start, mask=live[:, None] & within[None, :], other=0.0)
        given = exists[None, :] & within[:, None]
        sums = tl.dot(
            rows, tl.load(right + start, mask=given, other=0.0), sums, input_precision="ieee"
        )
        if GATED:
            other = tl.load(right + OUT * IN + start, mask=given, other=0.0)
            factors = tl.dot(rows, other, factors, input_precision="ieee")
    y = _activated(sums, KIND)
    if GATED:
        y = y * factors
    into = inner + places.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(into, y.to(inner.dtype.element_ty), mask=live[:, None] & exists[None, :])


@triton.jit
def _down(
    inner,
    down,
    shares,
    outer,
    pairs_by_expert,
    blocks,
    num_blocks,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
):
    """Rows of `inner` times their expert's matrix and their share: outer float32 [pair, OUT]."""
    block = tl.program_id(1)
    num_rows = tl.load(blocks + 2 * num_blocks + block)
    if num_rows == 0:
        return
    expert = tl.load(blocks + block).to(tl.int64)
    places = tl.load(blocks + num_blocks + block) + tl.arange(0, ROWS)
    live = tl.arange(0, ROWS) < num_rows
    pairs = tl.load(pairs_by_expert + places, mask=live, other=0)
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < OUT
    steps = tl.arange(0, STEP)
    left = inner + places.to(tl.int64)[:, None] * IN + steps[None, :]
    right = down + expert * (OUT * IN) + columns.to(tl.int64)[None, :] * IN + steps[:, None]
    sums = tl.full((ROWS, COLUMNS), 0.0, tl.float32)
    for start in range(0, IN, STEP):
        within = start + steps < IN
        rows = tl.load(left + start, mask=live[:, None] & within[None, :], other=0.0)
        given = exists[None, :] & within[:, None]
        sums = tl.dot(
            rows, tl.load(right + start, mask=given, other=0.0), sums, input_precision="ieee"
        )
    y = sums * tl.load(shares + pairs, mask=live, other=0.0)[:, None]
    into = outer + pairs.to(tl.int64)[:, None] * OUT + columns[None, :]
    tl.store(into, y, mask=live[:, None] & exists[None, :])


@triton.jit
def _sum(
    outer,
    residual,
    y,
    size,
    residual_stride,
    OUT: tl.constexpr,
    TOP_K: tl.constexpr,
    ADDS: tl.constexpr,
    AT: tl.constexpr,
):
    """Adds up a token's rows in the order of its choices, and the residual, and rounds once."""
    places = tl.program_id(0).to(tl.int64) * AT + tl.arange(0, AT)
    exists = places < size
    tokens, columns = places // OUT, places % OUT
    rows = outer + tokens * (TOP_K * OUT) + columns
    total = tl.load(rows, mask=exists, other=0.0)
    for choice in range(1, TOP_K):
        total += tl.load(rows + choice * OUT, mask=exists, other=0.0)
    if ADDS:
        row = residual + tokens * residual_stride + columns
        total += tl.load(row, mask=exists, other=0.0).to(tl.float32)
    tl.store(y + places, total.to(y.dtype.element_ty), mask=exists)


def sort_by_expert(chosen: Tensor, experts: int, rows: int) -> tuple[Tensor, Tensor]:
    """Pairs int32 [T k], sorted by expert, and int32 [3, blocks] of at most `rows` of them.

    A block has an expert, the place of its first pair and a number of pairs, which is 0 for blocks
    that are not needed; `chosen` is int64 [T, k], contiguous.
    """
    pairs, device = chosen.numel(), chosen.device
    num_chunks = triton.cdiv(pairs, CHUNK)
    # Every expert that is chosen at all may have a block with a single row.
    num_blocks = (pairs + min(experts, pairs) * (rows - 1)) // rows
    counts = torch.empty((num_chunks, experts), dtype=torch.int32, device=device)
    pairs_by_expert = torch.empty(pairs, dtype=torch.int32, device=device)
    blocks = torch.empty((3, num_blocks), dtype=torch.int32, device=device)
    _count[(num_chunks, triton.cdiv(experts, EXPERTS_AT_ONCE))](
        chosen, counts, pairs, EXPERTS=experts, CHUNK=CHUNK, AT=EXPERTS_AT_ONCE
    )
    _sort[(num_chunks + triton.cdiv(num_blocks, CHUNK),)](
        chosen,
        counts,
        pairs_by_expert,
        blocks,
        pairs,
        num_chunks,
        num_blocks,
        EXPERTS=experts,
        ROWS=rows,
        CHUNK=CHUNK,
        AT=EXPERTS_AT_ONCE,
        CHUNKS=CHUNKS_AT_ONCE,
        num_warps=8,
    )
    return pairs_by_expert, blocks


class CudaExperts:
    """See `backend.Mixture`. Nothing but a row itself decides its bits; two runs have the same."""

    def __init__(self, up: Tensor, down: Tensor, *, activation: Activation, gated: bool) -> None:
        self._up, self._down = up.contiguous(), down.contiguous()
        self._kind, self._gated = activation.value, gated
        self._step = STEP_BYTES // up.element_size()

    def __call__(
        self, x: Tensor, chosen: Tensor, shares: Tensor, residual: Tensor | None = None
    ) -> Tensor:
        experts, pairs = len(self._up), chosen.numel()
        tile = tile_for(pairs, experts)
        chosen = chosen.contiguous()
        order = sort_by_expert(chosen, experts, tile.rows)
        inner = self._through_up(x if x.stride(1) == 1 else x.contiguous(), chosen, order, tile)
        outer = self._through_down(inner, shares.contiguous(), order, tile)
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        added = outer if residual is None else residual
        if added.stride(1) != 1:
            added = added.contiguous()
        _sum[(triton.cdiv(y.numel(), SUMS_AT_ONCE),)](
            outer,
            added,
            y,
            y.numel(),
            added.stride(0),
            OUT=x.shape[1],
            TOP_K=chosen.shape[1],
            ADDS=residual is not None,
            AT=SUMS_AT_ONCE,
        )
        return y

    def _through_up(
        self, x: Tensor, chosen: Tensor, order: tuple[Tensor, Tensor], tile: Tile
    ) -> Tensor:
        pairs_by_expert, blocks = order
        num_blocks, size = blocks.shape[1], self._down.shape[2]
        inner = torch.empty((chosen.numel(), size), dtype=x.dtype, device=x.device)
        _up[(triton.cdiv(size, tile.columns), num_blocks)](
            x,
            self._up,
            inner,
            pairs_by_expert,
            blocks,
            num_blocks,
            x.stride(0),
            chosen.shape[1],
            IN=x.shape[1],
            OUT=size,
            KIND=self._kind,
            GATED=self._gated,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            STEP=self._step,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return inner

    def _through_down(
        self, inner: Tensor, shares: Tensor, order: tuple[Tensor, Tensor], tile: Tile
    ) -> Tensor:
        pairs_by_expert, blocks = order
        num_blocks, width = blocks.shape[1], self._down.shape[1]
        outer = torch.empty((len(inner), width), dtype=torch.float32, device=inner.device)
        _down[(triton.cdiv(width, tile.columns), num_blocks)](
            inner,
            self._down,
            shares,
            outer,
            pairs_by_expert,
            blocks,
            num_blocks,
            IN=inner.shape[1],
            OUT=width,
            ROWS=tile.rows,
            COLUMNS=tile.columns,
            STEP=self._step,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
        return outer
