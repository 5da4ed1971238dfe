"""State space duality in Triton: an own step for decodes; segments in chunks, as in `fast.py`.

A step reads and writes each number of a state once, where it lies. Of segments, fla computes what
the tokens of a chunk read; the states pass from chunk to chunk in an own kernel, which knows units
and groups, and writes exports on its way.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from fla.ops.common.chunk_o import chunk_fwd_o
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.chunk_grid import CHUNK, LOG2_E
from engine.ops.pointwise.cuda import softplus
from engine.ops.segments import Segments
from engine.ops.ssd import fast
from engine.ops.ssd.parameters import SSDParameters
from engine.ops.state_pool import move_segments

# Numbers of a state that one program moves in a step: 32 for each thread.
TILE = 4096
# Numbers of a state that one program carries over a segment's chunks, 64 for each thread.
CARRIED = 8192
# Of channels and numbers of a head's state in chunks: below 16 a matrix product on a device has no
# tile, and of more than 256 numbers too few rows fit.
NARROWEST, WIDEST = 16, 256


class _Steps(NamedTuple):
    """How dt comes about, for a kernel: tensors [H] that it may read, and what it does."""

    dt: Tensor
    bias: Tensor
    d: Tensor
    low: float
    high: float
    flags: dict[str, bool]

    @classmethod
    def of(cls, x: Tensor, dt: Tensor | None, parameters: SSDParameters) -> "_Steps":
        # A tensor that no kernel reads must still be named.
        bias, d, unread = parameters.dt_bias, parameters.d, parameters.a
        return cls(
            unread.expand(x.shape[:2]) if dt is None else dt,
            unread if bias is None else bias,
            unread if d is None else d,
            *parameters.limits,
            {"HAS_DT": dt is not None, "HAS_BIAS": bias is not None, "HAS_D": d is not None},
        )

    def after(self, rows: int) -> "_Steps":
        """The same, of the rows from there on."""
        return self._replace(dt=self.dt[rows:])


def ssd(
    x: Tensor,
    dt: Tensor | None,
    b: Tensor,
    c: Tensor,
    pool: Tensor,
    index: StateIndex,
    *,
    parameters: SSDParameters,
) -> Tensor:
    """See `backend.StateSpaceDuality`."""
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    steps = _Steps.of(x, dt, parameters)
    decodes = index.lens.num_decodes
    if decodes:
        _decode((x, b, c), steps, parameters.a, pool, index, y)
    if x.shape[0] > decodes:
        rows = x[decodes:], b[decodes:], c[decodes:]
        y[decodes:] = _move(rows, steps.after(decodes), parameters, pool, index)
    return y


def _decode(
    rows: tuple[Tensor, Tensor, Tensor],
    steps: _Steps,
    a: Tensor,
    pool: Tensor,
    index: StateIndex,
    y: Tensor,
) -> None:
    x, b, c = rows
    heads, dim, size = pool.shape[1:]
    block_n = triton.next_power_of_2(size)
    block_p = min(triton.next_power_of_2(dim), max(1, TILE // block_n))
    _step[(triton.cdiv(dim, block_p), heads, index.lens.num_decodes)](
        x,
        steps.dt,
        a,
        b,
        c,
        steps.bias,
        steps.d,
        pool,
        index.units,
        y,
        steps.low,
        steps.high,
        heads // b.shape[1],
        dim,
        size,
        *x.stride(),
        *steps.dt.stride(),
        *b.stride(),
        *c.stride(),
        *pool.stride(),
        *y.stride()[:2],
        BLOCK_P=block_p,
        BLOCK_N=block_n,
        **steps.flags,
    )


def _move(
    rows: tuple[Tensor, Tensor, Tensor],
    steps: _Steps,
    parameters: SSDParameters,
    pool: Tensor,
    index: StateIndex,
) -> Tensor:
    """y of the segments' x, b and c; their states and exports move on."""
    x, b, c = rows
    dim, size = pool.shape[2:]
    if dim < NARROWEST or not NARROWEST <= size <= WIDEST:
        # Heads of small models only, and none is known with larger states.
        dt = steps.dt if steps.flags["HAS_DT"] else None
        own = [x, fast.time_steps(x, dt, parameters), b, c]
        found = move_segments(own, pool, index, fast.chunk_with(parameters.a), wide=True)
        return found if parameters.d is None else found.addcmul_(x, parameters.d.unsqueeze(-1))
    segments, units = Segments.of(index), index.units[index.lens.num_decodes :]
    b, c = b.contiguous(), c.contiguous()
    decay, push = _prepare(x, steps, parameters.a, segments)
    before = _carry(b, push, decay, pool, segments, units)
    # Fla has each piece's chunks counted anew, as they are in `segments`.
    y: Tensor = chunk_fwd_o(
        c.unsqueeze(0),
        b.unsqueeze(0),
        push.unsqueeze(0),
        before.unsqueeze(0),
        decay.unsqueeze(0),
        scale=1.0,
        state_v_first=True,
        cu_seqlens=segments.pieces.starts,
        chunk_size=CHUNK,
        chunk_indices=segments.pieces.chunks,
    ).squeeze(0)
    return y if parameters.d is None else y.float().addcmul_(x, parameters.d.unsqueeze(-1))


def _prepare(x: Tensor, steps: _Steps, a: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """Sums of log2 of the decays from each chunk's start, float32 [T, H], and dt x [T, H, P]."""
    tokens, heads, dim = x.shape
    decay = torch.empty(tokens, heads, dtype=torch.float32, device=x.device)
    push = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _pushes[(segments.chunks.shape[0], heads)](
        x,
        steps.dt,
        a,
        steps.bias,
        segments.chunks,
        decay,
        push,
        steps.low,
        steps.high,
        heads,
        dim,
        *x.stride(),
        *steps.dt.stride(),
        LOG2_E=LOG2_E,
        CHUNK=CHUNK,
        BLOCK_P=triton.next_power_of_2(dim),
        HAS_DT=steps.flags["HAS_DT"],
        HAS_BIAS=steps.flags["HAS_BIAS"],
    )
    return decay, push


def _carry(
    b: Tensor, push: Tensor, decay: Tensor, pool: Tensor, segments: Segments, units: Tensor
) -> Tensor:
    """The states before each chunk [C, H, P, N], of b's dtype; final ones and exports are kept."""
    heads, dim, size = pool.shape[1:]
    block_n = triton.next_power_of_2(size)
    before = torch.empty(segments.chunks.shape[0], heads, dim, size, dtype=b.dtype, device=b.device)
    block_p = min(triton.next_power_of_2(dim), CARRIED // block_n)
    _states[(triton.cdiv(dim, block_p), heads, units.shape[0])](
        b,
        push,
        decay,
        pool,
        units,
        segments.chunk_starts,
        segments.chunks,
        before,
        heads // b.shape[1],
        heads,
        dim,
        size,
        b.shape[1],
        *pool.stride(),
        CHUNK=CHUNK,
        BLOCK_P=block_p,
        BLOCK_N=block_n,
    )
    return before


@triton.jit
def _time_step(dt, bias, low, high, HAS_BIAS: tl.constexpr):
    """float32, of numbers and a pointer."""
    dt = dt.to(tl.float32)
    if HAS_BIAS:
        dt += tl.load(bias)
    return tl.minimum(tl.maximum(softplus(dt), low), high)


@triton.jit
def _step(
    x,
    dt,
    a,
    b,
    c,
    bias,
    d,
    pool,
    units,
    y,
    low,
    high,
    shared,
    dim,
    size,
    x_row,
    x_head,
    x_channel,
    dt_row,
    dt_head,
    b_row,
    b_group,
    b_number,
    c_row,
    c_group,
    c_number,
    pool_unit,
    pool_head,
    pool_channel,
    pool_number,
    y_row,
    y_head,
    HAS_DT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One token, some channels of one head: `shared` heads have one group's b and c."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    number = tl.arange(0, BLOCK_N)
    has_channel, has_number = channel < dim, number < size
    out = y + row * y_row + head * y_head + channel
    unit = tl.load(units + row)
    if unit < 0:
        tl.store(out, tl.zeros([BLOCK_P], tl.float32), mask=has_channel)
        return
    place = pool + unit * pool_unit + head * pool_head
    place += channel[:, None] * pool_channel + number[None, :] * pool_number
    inside = has_channel[:, None] & has_number[None, :]
    state = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    group = head // shared
    from_x = x + row * x_row + head * x_head + channel * x_channel
    value = tl.load(from_x, mask=has_channel, other=0.0).to(tl.float32)
    from_b = b + row * b_row + group * b_group + number * b_number
    key = tl.load(from_b, mask=has_number, other=0.0).to(tl.float32)
    from_c = c + row * c_row + group * c_group + number * c_number
    query = tl.load(from_c, mask=has_number, other=0.0).to(tl.float32)
    log_decay = tl.load(a + head)
    push = value
    if HAS_DT:
        number = tl.load(dt + row * dt_row + head * dt_head)
        step = _time_step(number, bias + head, low, high, HAS_BIAS)
        log_decay *= step
        push *= step
    state *= tl.exp(log_decay)
    state += push[:, None] * key[None, :]
    tl.store(place, state.to(pool.dtype.element_ty), mask=inside)
    result = tl.sum(state * query[None, :], 1)
    if HAS_D:
        result += value * tl.load(d + head)
    tl.store(out, result, mask=has_channel)


@triton.jit
def _pushes(
    x,
    dt,
    a,
    bias,
    chunks,
    decay,
    push,
    low,
    high,
    heads,
    dim,
    x_row,
    x_head,
    x_channel,
    dt_row,
    dt_head,
    LOG2_E: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_DT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    """Of one chunk and head: the decays' sums, and dt x."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(chunks + 3 * chunk)
    inside = tl.arange(0, CHUNK) < tl.load(chunks + 3 * chunk + 1)
    row = first + tl.arange(0, CHUNK)
    step = tl.where(inside, 1.0, 0.0)
    if HAS_DT:
        number = tl.load(dt + row * dt_row + head * dt_head, mask=inside, other=0.0)
        step *= _time_step(number, bias + head, low, high, HAS_BIAS)
    # Less than 2^-40 of a state is nothing beside what comes, and sums of at most 64 such decays
    # keep the digits of the weak ones among them.
    total = tl.cumsum(tl.maximum(step * tl.load(a + head) * LOG2_E, -40.0), 0)
    tl.store(decay + row * heads + head, total, mask=inside)
    channel = tl.arange(0, BLOCK_P)
    wanted = inside[:, None] & (channel < dim)[None, :]
    place = row[:, None] * x_row + head * x_head + channel[None, :] * x_channel
    value = tl.load(x + place, mask=wanted, other=0.0).to(tl.float32) * step[:, None]
    place = (row[:, None] * heads + head) * dim + channel[None, :]
    tl.store(push + place, value.to(push.dtype.element_ty), mask=wanted)


@triton.jit
def _states(
    b,
    push,
    decay,
    pool,
    units,
    chunk_starts,
    chunks,
    before,
    shared,
    heads,
    dim,
    size,
    groups,
    pool_unit,
    pool_head,
    pool_channel,
    pool_number,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Some channels of one head: the state from chunk to chunk of one segment."""
    segment = tl.program_id(2)
    head = tl.program_id(1)
    channel = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    number = tl.arange(0, BLOCK_N)
    has_channel, has_number = channel < dim, number < size
    inside = has_channel[:, None] & has_number[None, :]
    own = pool + head * pool_head
    own += channel[:, None] * pool_channel + number[None, :] * pool_number
    unit = tl.load(units + segment)
    state = tl.load(own + unit * pool_unit, mask=inside, other=0.0).to(tl.float32)
    token = tl.arange(0, CHUNK)
    for chunk in range(tl.load(chunk_starts + segment), tl.load(chunk_starts + segment + 1)):
        first = tl.load(chunks + 3 * chunk)
        length = tl.load(chunks + 3 * chunk + 1)
        export = tl.load(chunks + 3 * chunk + 2)
        place = ((chunk * heads + head) * dim + channel[:, None]) * size + number[None, :]
        tl.store(before + place, state.to(before.dtype.element_ty), mask=inside)
        row = first + token
        there = token < length
        total = tl.load(decay + row * heads + head, mask=there, other=0.0)
        last = tl.load(decay + (first + length - 1) * heads + head)
        # A token's contribution decays from its position to the end of the chunk.
        left = tl.exp2(last - total)
        place = (row[:, None] * heads + head) * dim + channel[None, :]
        pushed = tl.load(push + place, mask=there[:, None] & has_channel[None, :], other=0.0)
        pushed = tl.trans((pushed.to(tl.float32) * left[:, None]).to(push.dtype.element_ty))
        place = (row[:, None] * groups + head // shared) * size + number[None, :]
        keys = tl.load(b + place, mask=there[:, None] & has_number[None, :], other=0.0)
        state *= tl.exp2(last)
        state += tl.dot(pushed, keys, input_precision="ieee")
        if export >= 0:
            tl.store(own + export * pool_unit, state.to(pool.dtype.element_ty), mask=inside)
    tl.store(own + unit * pool_unit, state.to(pool.dtype.element_ty), mask=inside)
