"""The selective scan (Mamba-1) in Triton: token by token, side by side over channels.

Rounding is that of the plain recurrence, in a decode step and in segments: neither neighbours nor
exports change a bit.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.segments import Segments

# Numbers of a state that one program moves in a step. Of segments, which wait for memory at every
# token, a program takes what one warp holds, so that many run at once.
TILE, SCAN_TILE = 2048, 512


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, pool: Tensor, index: StateIndex
) -> Tensor:
    """See `backend.SelectiveScan`."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    size, channels = a.shape
    decodes = index.lens.num_decodes
    if decodes:
        block_n, block_d = _blocks(size, channels, TILE)
        _step[(triton.cdiv(channels, block_d), decodes)](
            x,
            dt,
            a,
            b,
            c,
            pool,
            index.units,
            y,
            size,
            channels,
            *x.stride(),
            *dt.stride(),
            *a.stride(),
            *b.stride(),
            *c.stride(),
            *pool.stride(),
            BLOCK_N=block_n,
            BLOCK_D=block_d,
        )
    if x.shape[0] > decodes:
        _move((x, dt, b, c, y), a, pool, index)
    return y


def _move(rows: tuple[Tensor, ...], a: Tensor, pool: Tensor, index: StateIndex) -> None:
    """Writes y of the segments' rows, the last of `rows`, and moves their states."""
    decodes = index.lens.num_decodes
    segments, units = Segments.of(index), index.units[decodes:]
    x, dt, b, c, y = (part[decodes:] for part in rows)
    size, channels = a.shape
    block_n, block_d = _blocks(size, channels, SCAN_TILE)
    _scan[(triton.cdiv(channels, block_d), units.shape[0])](
        x,
        dt,
        a,
        b,
        c,
        pool,
        units,
        y,
        segments.starts,
        segments.export_starts,
        segments.export_offsets,
        segments.export_units,
        size,
        channels,
        *x.stride(),
        *dt.stride(),
        *a.stride(),
        *b.stride(),
        *c.stride(),
        *pool.stride(),
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        num_warps=1,
    )


def _blocks(size: int, channels: int, tile: int) -> tuple[int, int]:
    """All numbers of a channel, and as many channels as are a tile."""
    block_n = triton.next_power_of_2(size)
    return block_n, min(triton.next_power_of_2(channels), max(1, tile // block_n))


@triton.jit
def _moved(state, rates, x, dt, b):
    """The state [N, D] after one token: x and dt [D], b [N], all float32."""
    return state * tl.exp(rates * dt[None, :]) + b[:, None] * (x * dt)[None, :]


@triton.jit
def _token(x, dt, b, c, has_channel, has_number):
    """One token of four pointers, as float32; zeros outside."""
    return (
        tl.load(x, mask=has_channel, other=0.0).to(tl.float32),
        tl.load(dt, mask=has_channel, other=0.0).to(tl.float32),
        tl.load(b, mask=has_number, other=0.0).to(tl.float32),
        tl.load(c, mask=has_number, other=0.0).to(tl.float32),
    )


@triton.jit
def _step(
    x,
    dt,
    a,
    b,
    c,
    pool,
    units,
    y,
    size,
    channels,
    x_row,
    x_channel,
    dt_row,
    dt_channel,
    a_number,
    a_channel,
    b_row,
    b_number,
    c_row,
    c_number,
    pool_unit,
    pool_number,
    pool_channel,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One token, some channels."""
    row = tl.program_id(1).to(tl.int64)
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    number = tl.arange(0, BLOCK_N)
    has_channel, has_number = channel < channels, number < size
    out = y + row * channels + channel
    unit = tl.load(units + row)
    if unit < 0:
        tl.store(out, tl.zeros([BLOCK_D], tl.float32), mask=has_channel)
        return
    inside = has_number[:, None] & has_channel[None, :]
    place = (
        pool + unit * pool_unit + number[:, None] * pool_number + channel[None, :] * pool_channel
    )
    state = tl.load(place, mask=inside, other=0.0)
    rates = a + number[:, None] * a_number + channel[None, :] * a_channel
    rates = tl.load(rates, mask=inside, other=0.0)
    value, step, key, query = _token(
        x + row * x_row + channel * x_channel,
        dt + row * dt_row + channel * dt_channel,
        b + row * b_row + number * b_number,
        c + row * c_row + number * c_number,
        has_channel,
        has_number,
    )
    state = _moved(state, rates, value, step, key)
    tl.store(place, state, mask=inside)
    tl.store(out, tl.sum(state * query[:, None], 0), mask=has_channel)


@triton.jit
def _scan(
    x,
    dt,
    a,
    b,
    c,
    pool,
    units,
    y,
    starts,
    export_starts,
    export_offsets,
    export_units,
    size,
    channels,
    x_row,
    x_channel,
    dt_row,
    dt_channel,
    a_number,
    a_channel,
    b_row,
    b_number,
    c_row,
    c_number,
    pool_unit,
    pool_number,
    pool_channel,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Some channels of one segment, from export to export."""
    segment = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    number = tl.arange(0, BLOCK_N)
    has_channel, has_number = channel < channels, number < size
    inside = has_number[:, None] & has_channel[None, :]
    own = pool + number[:, None] * pool_number + channel[None, :] * pool_channel
    unit = tl.load(units + segment)
    state = tl.load(own + unit * pool_unit, mask=inside, other=0.0)
    rates = a + number[:, None] * a_number + channel[None, :] * a_channel
    rates = tl.load(rates, mask=inside, other=0.0)
    x += channel * x_channel
    dt += channel * dt_channel
    b += number * b_number
    c += number * c_number
    first = tl.load(starts + segment)
    end = tl.load(starts + segment + 1)
    export = tl.load(export_starts + segment)
    exports = tl.load(export_starts + segment + 1)
    # The next token's numbers are on their way while this one's are computed.
    value, step, key, query = _token(
        x + first * x_row,
        dt + first * dt_row,
        b + first * b_row,
        c + first * c_row,
        has_channel,
        has_number,
    )
    for row in range(first, end):
        after = tl.minimum(row + 1, end - 1)
        next_value, next_step, next_key, next_query = _token(
            x + after * x_row,
            dt + after * dt_row,
            b + after * b_row,
            c + after * c_row,
            has_channel,
            has_number,
        )
        state = _moved(state, rates, value, step, key)
        tl.store(y + row * channels + channel, tl.sum(state * query[:, None], 0), mask=has_channel)
        due = tl.load(export_offsets + export, mask=export < exports, other=0)
        if due == row + 1 - first:
            place = own + tl.load(export_units + export) * pool_unit
            tl.store(place, state, mask=inside)
            export += 1
        value, step, key, query = next_value, next_step, next_key, next_query
    tl.store(own + unit * pool_unit, state, mask=inside)
