"""The gated delta rule in Triton: an own step for decodes, fla's chunked scans for segments.

A step reads and writes each number of a state once, where it lies. Fla knows no units and gives no
state from inside of a segment: states are gathered and put back, and segments with exports are cut
there and computed by rounds (see `segments`).
"""

import torch
import triton
import triton.language as tl
from fla.ops.gated_delta_rule import chunk_gated_delta_rule
from fla.ops.kda import chunk_kda
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.gated_delta_rule import fast
from engine.ops.gated_delta_rule.naive import NORM_EPS
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.pointwise.cuda import sigmoid, softplus
from engine.ops.segments import Pieces, Round, Segments
from engine.ops.state_pool import move_segments

# Numbers of a state that one program moves, 32 for each thread: enough to read at once, and of few
# sequences all multiprocessors still get some.
TILE = 4096
# Of keys and values in fla's kernels: below 16 a matrix product on a device has no tile, and above
# 256 keys a state does not fit.
NARROWEST, WIDEST_KEY = 16, 256


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    pool: Tensor,
    index: StateIndex,
    *,
    parameters: DeltaRuleParameters,
) -> Tensor:
    """See `backend.GatedDeltaRule`."""
    y = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    decodes = index.lens.num_decodes
    if decodes:
        _decode((q, k, v, a, b), pool, index, y, parameters)
    if v.shape[0] > decodes:
        rows = [x[decodes:] for x in (q, k, v)]
        rows += rates(a[decodes:], b[decodes:], parameters)
        y[decodes:] = _move(rows, pool, index)
    return y


def rates(a: Tensor, b: Tensor, parameters: DeltaRuleParameters) -> tuple[Tensor, Tensor]:
    """float32: the logarithms of the decays, of the shape of a, and beta [T, Hv]."""
    tokens, heads = b.shape
    channels = a.shape[2] if a.dim() == 3 else 1
    decay = torch.empty(a.shape, dtype=torch.float32, device=a.device)
    beta = torch.empty(b.shape, dtype=torch.float32, device=a.device)
    block = triton.next_power_of_2(max(heads, min(heads * channels, 1024)))
    _rates[(tokens, triton.cdiv(heads * channels, block))](
        a,
        b,
        parameters.rate,
        parameters.dt_bias,
        decay,
        beta,
        parameters.beta_scale,
        heads,
        channels,
        *a.stride()[:2],
        a.stride(2) if a.dim() == 3 else 0,
        *b.stride(),
        BLOCK=block,
    )
    return decay, beta


def _decode(
    rows: tuple[Tensor, ...],
    pool: Tensor,
    index: StateIndex,
    y: Tensor,
    parameters: DeltaRuleParameters,
) -> None:
    q, k, v, a, b = rows
    value_heads, key_dim, value_dim = pool.shape[1:]
    block_k = triton.next_power_of_2(key_dim)
    block_v = min(triton.next_power_of_2(value_dim), max(16, TILE // block_k))
    grid = (triton.cdiv(value_dim, block_v), value_heads, index.lens.num_decodes)
    _step[grid](
        q,
        k,
        v,
        a,
        b,
        parameters.rate,
        parameters.dt_bias,
        pool,
        index.units,
        y,
        parameters.beta_scale,
        key_dim**-0.5,
        value_heads // k.shape[1],
        key_dim,
        value_dim,
        *q.stride(),
        *k.stride(),
        *v.stride(),
        *a.stride()[:2],
        a.stride(2) if a.dim() == 3 else 0,
        *b.stride(),
        *pool.stride(),
        *y.stride()[:2],
        EPS=NORM_EPS,
        BY_CHANNEL=a.dim() == 3,
        BLOCK_K=block_k,
        BLOCK_V=block_v,
    )


def _move(rows: list[Tensor], pool: Tensor, index: StateIndex) -> Tensor:
    """y of the segments' q, k, v, log decays and beta; their states and exports move on."""
    key_dim, value_dim = pool.shape[2:]
    if not (NARROWEST <= key_dim <= WIDEST_KEY and value_dim >= NARROWEST):
        # Heads of small models only, and none is known with larger keys.
        return move_segments(rows, pool, index, fast.chunk_rows)
    segments, units = Segments.of(index), index.units[index.lens.num_decodes :]
    state = pool.index_select(0, units)
    y = rows[2].new_empty(0)
    for one in segments.rounds:
        if one.continued is not None:
            state = state.index_select(0, one.continued)
        own = rows if one.rows is None else [x.index_select(0, one.rows) for x in rows]
        part, state = _scan(own, state, one.pieces)
        _put_back(state, pool, units, one)
        if one.rows is None:
            return part
        y = y if len(y) else torch.empty_like(rows[2])
        y.index_copy_(0, one.rows, part)
    return y


def _put_back(state: Tensor, pool: Tensor, units: Tensor, one: Round) -> None:
    """Writes the states after a round's pieces to the segments that end and to exports."""
    if one.exported is not None and one.export_units is not None:
        pool.index_copy_(0, one.export_units, state.index_select(0, one.exported))
    if one.ended is not None and one.segments is not None:
        state, units = state.index_select(0, one.ended), units.index_select(0, one.segments)
    pool.index_copy_(0, units, state)


def _scan(rows: list[Tensor], initial: Tensor, pieces: Pieces) -> tuple[Tensor, Tensor]:
    """y of the pieces' rows, in the dtype of v, and the states after them."""
    q, k, v, decay, beta = (x.unsqueeze(0) for x in rows)
    # What else fla needs to know of the pieces it is told, or makes from the numbers on the host:
    # once a batch, since it knows these tensors again.
    if decay.dim() == 3:
        scan, known = chunk_gated_delta_rule, {"chunk_indices": pieces.chunks}
    else:
        scan, known = chunk_kda, {"cu_seqlens_cpu": pieces.starts_there}
    y, final = scan(
        q,
        k,
        v,
        decay,
        beta,
        initial_state=initial,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=pieces.starts,
        **known,
    )
    return y.squeeze(0), final


@triton.jit
def _log_decay(a, rate, bias):
    return softplus(a.to(tl.float32) + bias) * rate


@triton.jit
def _rates(
    a,
    b,
    rate,
    dt_bias,
    decay,
    beta,
    beta_scale,
    heads,
    channels,
    a_row,
    a_head,
    a_channel,
    b_row,
    b_head,
    BLOCK: tl.constexpr,
):
    """Some decays of one token and, in the first program, its betas."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < heads * channels
    head, channel = place // channels, place % channels
    number = tl.load(a + row * a_row + head * a_head + channel * a_channel, mask=inside, other=0.0)
    factor = tl.load(rate + head, mask=inside, other=0.0)
    bias = tl.load(dt_bias + place, mask=inside, other=0.0)
    # Less than exp(-28) of a state is nothing beside what comes, and sums of at most 64 such decays
    # keep the digits of the weak ones among them.
    log = tl.maximum(_log_decay(number, factor, bias), -28.0)
    tl.store(decay + row * heads * channels + place, log, mask=inside)
    if tl.program_id(1) == 0:
        number = tl.load(b + row * b_row + place * b_head, mask=place < heads, other=0.0)
        written = sigmoid(number.to(tl.float32)) * beta_scale
        tl.store(beta + row * heads + place, written, mask=place < heads)


@triton.jit
def _unit(start, step, channel, inside, EPS: tl.constexpr):
    """A vector of length one."""
    x = tl.load(start + channel * step, mask=inside, other=0.0).to(tl.float32)
    return x / tl.sqrt(tl.sum(x * x, 0) + EPS)


@triton.jit
def _step(
    q,
    k,
    v,
    a,
    b,
    rate,
    dt_bias,
    pool,
    units,
    y,
    beta_scale,
    scale,
    shared,
    key_dim,
    value_dim,
    q_row,
    q_head,
    q_channel,
    k_row,
    k_head,
    k_channel,
    v_row,
    v_head,
    v_channel,
    a_row,
    a_head,
    a_channel,
    b_row,
    b_head,
    pool_unit,
    pool_head,
    pool_key,
    pool_value,
    y_row,
    y_head,
    EPS: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """One token, some values of one head: `shared` value heads have one key head."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    key = tl.arange(0, BLOCK_K)
    value = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    has_key, has_value = key < key_dim, value < value_dim
    out = y + row * y_row + head * y_head + value
    unit = tl.load(units + row)
    if unit < 0:
        tl.store(out, tl.zeros([BLOCK_V], tl.float32), mask=has_value)
        return
    place = pool + unit * pool_unit + head * pool_head
    place += key[:, None] * pool_key + value[None, :] * pool_value
    inside = has_key[:, None] & has_value[None, :]
    state = tl.load(place, mask=inside, other=0.0)
    key_head = head // shared
    query = _unit(q + row * q_row + key_head * q_head, q_channel, key, has_key, EPS) * scale
    keys = _unit(k + row * k_row + key_head * k_head, k_channel, key, has_key, EPS)
    values = tl.load(v + row * v_row + head * v_head + value * v_channel, mask=has_value, other=0.0)
    factor = tl.load(rate + head)
    if BY_CHANNEL:
        number = tl.load(a + row * a_row + head * a_head + key * a_channel, mask=has_key, other=0.0)
        bias = tl.load(dt_bias + head * key_dim + key, mask=has_key, other=0.0)
        state *= tl.exp(_log_decay(number, factor, bias))[:, None]
    else:
        number = tl.load(a + row * a_row + head * a_head)
        state *= tl.exp(_log_decay(number, factor, tl.load(dt_bias + head)))
    number = tl.load(b + row * b_row + head * b_head).to(tl.float32)
    beta = sigmoid(number) * beta_scale
    seen = tl.sum(state * keys[:, None], 0)
    delta = (values.to(tl.float32) - seen) * beta
    state += keys[:, None] * delta[None, :]
    tl.store(place, state, mask=inside)
    tl.store(out, tl.sum(state * query[:, None], 0), mask=has_value)
