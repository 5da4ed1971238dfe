"""Depthwise causal convolution in Triton: a step for decodes, and segments at once.

A tap is added after the other, the oldest first, whatever the batch: a row's sum is always the
same.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.pointwise.cuda import sigmoid
from engine.ops.segments import Segments

CHANNELS = 256
# Of a segment's tokens and channels a program takes a tile of 4,096.
ROWS, ROW_CHANNELS = 32, 128


def causal_conv1d(
    x: Tensor,
    pool: Tensor,
    index: StateIndex,
    weight: Tensor,
    bias: Tensor | None,
    *,
    silu: bool = True,
) -> Tensor:
    """See `backend.CausalConv1d`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps, channels = weight.shape
    decodes = index.lens.num_decodes
    # Without a bias the kernel reads none, but a tensor must be named.
    weights = (weight, weight if bias is None else bias)
    flags = {"TAPS": taps, "HAS_BIAS": bias is not None, "SILU": silu}
    if decodes:
        _step[(decodes, triton.cdiv(channels, CHANNELS))](
            x,
            pool,
            index.units,
            *weights,
            y,
            channels,
            *x.stride(),
            *pool.stride(),
            *weight.stride(),
            BLOCK=CHANNELS,
            **flags,
        )
    if x.shape[0] > decodes:
        _segments(x[decodes:], pool, index, weights, y[decodes:], flags)
    return y


def _segments(
    x: Tensor,
    pool: Tensor,
    index: StateIndex,
    weights: tuple[Tensor, Tensor],
    y: Tensor,
    flags: dict[str, int],
) -> None:
    """Writes y of the segments' rows, then their states and exports."""
    segments, units = Segments.of(index), index.units[index.lens.num_decodes :]
    count, channels = units.shape[0], x.shape[1]
    _rows[(triton.cdiv(segments.longest, ROWS), count, triton.cdiv(channels, ROW_CHANNELS))](
        x,
        pool,
        units,
        *weights,
        y,
        segments.starts,
        channels,
        *x.stride(),
        *pool.stride(),
        *weights[0].stride(),
        BLOCK_ROWS=ROWS,
        BLOCK=ROW_CHANNELS,
        **flags,
    )
    # Apart from the rows, whose programs must all have read the states from before.
    _states[(count, triton.cdiv(channels, CHANNELS))](
        x,
        pool,
        units,
        segments.starts,
        segments.export_starts,
        segments.export_offsets,
        segments.export_units,
        channels,
        *x.stride(),
        *pool.stride(),
        TAPS=flags["TAPS"],
        BLOCK=CHANNELS,
    )


@triton.jit
def _finished(y, channel, inside, bias, HAS_BIAS: tl.constexpr, SILU: tl.constexpr):
    """A sum with its bias, through SiLU."""
    if HAS_BIAS:
        y += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        y = y * sigmoid(y)
    return y


@triton.jit
def _step(
    x,
    pool,
    units,
    weight,
    bias,
    y,
    channels,
    x_row,
    x_channel,
    pool_unit,
    pool_row,
    pool_channel,
    weight_tap,
    weight_channel,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One token: y, and the state's rows move up by one, IN PLACE."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    out = y + row * channels + channel
    unit = tl.load(units + row)
    if unit < 0:
        tl.store(out, tl.zeros([BLOCK], tl.float32).to(y.dtype.element_ty), mask=inside)
        return
    state = pool + unit * pool_unit + channel * pool_channel
    taps = weight + channel * weight_channel
    new = tl.load(x + row * x_row + channel * x_channel, mask=inside, other=0.0)
    total = tl.zeros([BLOCK], tl.float32)
    for tap in tl.static_range(TAPS - 1):
        old = tl.load(state + tap * pool_row, mask=inside, other=0.0)
        factor = tl.load(taps + tap * weight_tap, mask=inside, other=0.0)
        total += old.to(tl.float32) * factor.to(tl.float32)
        # Each row is read before the next one takes its place, the first one is dropped.
        if tap > 0:
            tl.store(state + (tap - 1) * pool_row, old, mask=inside)
    if TAPS > 1:
        moved = new.to(pool.dtype.element_ty)
        tl.store(state + (TAPS - 2) * pool_row, moved, mask=inside)
    factor = tl.load(taps + (TAPS - 1) * weight_tap, mask=inside, other=0.0)
    total += new.to(tl.float32) * factor.to(tl.float32)
    total = _finished(total, channel, inside, bias, HAS_BIAS, SILU)
    tl.store(out, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _rows(
    x,
    pool,
    units,
    weight,
    bias,
    y,
    starts,
    channels,
    x_row,
    x_channel,
    pool_unit,
    pool_row,
    pool_channel,
    weight_tap,
    weight_channel,
    TAPS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y of some rows of a segment; inputs from before its first row are those of its state."""
    segment = tl.program_id(1)
    first = tl.load(starts + segment)
    length = tl.load(starts + segment + 1) - first
    begin = tl.program_id(0) * BLOCK_ROWS
    if begin >= length:
        return
    unit = tl.load(units + segment)
    # int64: rows of a wide product are more numbers than int32 counts.
    row = begin + tl.arange(0, BLOCK_ROWS).to(tl.int64)[:, None]
    channel = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    inputs = x + first * x_row + (channel * x_channel)[None, :]
    state = pool + unit * pool_unit + (channel * pool_channel)[None, :]
    wanted = (row < length) & inside[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    # state   0 .. K-2 | x   0 .. length-1
    # rows  -(K-1) ..-1|     0 ..
    for tap in tl.static_range(TAPS):
        source = row + tap - (TAPS - 1)
        value = tl.load(inputs + source * x_row, mask=wanted & (source >= 0), other=0.0)
        value = value.to(tl.float32)
        if begin < TAPS - 1:
            old = state + (source + TAPS - 1) * pool_row
            value += tl.load(old, mask=wanted & (source < 0), other=0.0).to(tl.float32)
        factor = tl.load(
            weight + tap * weight_tap + channel * weight_channel, mask=inside, other=0.0
        )
        total += value * factor.to(tl.float32)[None, :]
    total = _finished(total, channel[None, :], inside[None, :], bias, HAS_BIAS, SILU)
    out = y + (first + row) * channels + channel[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=wanted)


@triton.jit
def _states(
    x,
    pool,
    units,
    starts,
    export_starts,
    export_offsets,
    export_units,
    channels,
    x_row,
    x_channel,
    pool_unit,
    pool_row,
    pool_channel,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A segment's states: those to export, then its own, which is written over."""
    segment = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    first = tl.load(starts + segment)
    length = tl.load(starts + segment + 1) - first
    begin = tl.load(export_starts + segment)
    own = tl.load(units + segment)
    inputs = x + first * x_row + channel * x_channel
    state = pool + own * pool_unit + channel * pool_channel
    for number in range(begin, tl.load(export_starts + segment + 1)):
        end = tl.load(export_offsets + number)
        after = pool + tl.load(export_units + number) * pool_unit + channel * pool_channel
        _keep(inputs, state, after, end, inside, x_row, pool_row, TAPS)
    _keep(inputs, state, state, length, inside, x_row, pool_row, TAPS)


@triton.jit
def _keep(inputs, before, after, end, inside, x_row, pool_row, TAPS: tl.constexpr):
    """The state after `end` inputs, at least one: the last rows of the one before and of those."""
    # In a segment shorter than the state some rows only move up, perhaps within one state: each is
    # read before it is written over.
    for tap in tl.static_range(TAPS - 1):
        source = end + tap - (TAPS - 1)
        if source >= 0:
            value = tl.load(inputs + source * x_row, mask=inside, other=0.0)
            value = value.to(before.dtype.element_ty)
        else:
            value = tl.load(before + (end + tap) * pool_row, mask=inside, other=0.0)
        tl.store(after + tap * pool_row, value, mask=inside)
