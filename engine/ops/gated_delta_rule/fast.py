"""The gated delta rule in chunks (prefill) and as one rank-1 update (decode), in float32.

`step` and `chunk` have the signatures of `naive.py`, and `scratch`. The chunk form is the UT
transform of arXiv 2412.06464: work inside chunks is one batch over all chunks of all segments, a
short scan carries the state. Decays by head are a matrix beside q k^T; decays by channel (arXiv
2510.26692) are inside of the product, which is then put together from blocks.
"""

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.chunk_grid import LOG2_E, ChunkGrid
from engine.ops.gated_delta_rule.naive import NORM_EPS
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.scratch import Scratch
from engine.ops.state_pool import move_states

Pairs = tuple[Tensor, Tensor, Tensor, Tensor]
"""q k^T and k k^T [chunks, Hv, C, C], decayed, the first with zeros above its diagonal.

Then the decay from each chunk's start, and to its end: [chunks, Hv, C, 1 or dk].
"""


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
    scratch: Scratch,
) -> Tensor:
    """See `backend.GatedDeltaRule`."""
    return move_states(
        [q, k, v, *_rates(a, b, parameters)],
        pool,
        index,
        lambda rows, state: step(*rows[:4], beta=rows[4], state=state, scratch=scratch),
        chunk_rows,
    )


def _rates(a: Tensor, b: Tensor, parameters: DeltaRuleParameters) -> tuple[Tensor, Tensor]:
    """float32: the logarithms of the decays, of the shape of a, and beta [T, Hv]."""
    rate = parameters.rate if a.dim() == 2 else parameters.rate.unsqueeze(-1)
    decay = F.softplus(a.float() + parameters.dt_bias).mul_(rate)
    beta = b.float().sigmoid()
    return decay, beta if parameters.beta_scale == 1.0 else beta.mul_(parameters.beta_scale)


def chunk_rows(
    rows: Sequence[Tensor], initial: Tensor, lens: list[int], exports: list[tuple[int, int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """`chunk` as a `state_pool.Chunk`: rows are q, k, v, g and beta."""
    return chunk(*rows[:4], beta=rows[4], query_lens=lens, initial=initial, exports=exports)


def step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    beta: Tensor,
    state: Tensor,
    scratch: Scratch,
) -> Tensor:
    """One token of every sequence: q, k [S, Hk, dk], v [S, Hv, dv], beta [S, Hv] float32.

    `g` [S, Hv] or [S, Hv, dk] float32. `state` [S, Hv, dk, dv] float32, possibly strided, is
    updated IN PLACE. Returns [S, Hv, dv] float32.
    """
    repeats = v.shape[1] // k.shape[1]
    kq = _per_value_head(_unit_(torch.stack([k, q], dim=2).float()), repeats)
    decay = g.exp().view(*g.shape[:2], -1, 1)
    # A strided state would be copied for the product anyway; so the copy takes the decay along.
    decayed = torch.mul(state, decay, out=scratch.take("state", tuple(state.shape), state))
    seen, kept = torch.matmul(kq, decayed).unbind(2)
    key, query = kq.unbind(2)
    delta = (v - seen).mul_(beta.unsqueeze(-1))
    torch.addcmul(decayed, key.unsqueeze(-1), delta.unsqueeze(-2), out=state)
    # The read of the new state without reading it again: q S' = q S + (q . k) delta.
    overlap = torch.linalg.vecdot(key, query).unsqueeze(-1)
    return torch.addcmul(kept, overlap, delta).mul_(q.shape[-1] ** -0.5)


def chunk(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    *,
    beta: Tensor,
    query_lens: list[int],
    initial: Tensor,
    exports: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments end to end: as `step`, T = sum(query_lens) rows; `initial` is not changed.

    `exports`: (segment, tokens of it), ascending. Returns [T, Hv, dv] float32, the final states and
    the states at the exports [E, Hv, dk, dv].
    """
    grid = ChunkGrid.over(query_lens, q.device, exports)
    repeats = v.shape[1] // k.shape[1]
    q, k = (_unit_(grid.spread(x)) for x in (q, k))
    v, rate, g = grid.spread(v), grid.spread(beta).unsqueeze(-1), grid.spread(g)
    attention, system, decay, to_end = (_by_head if g.dim() == 3 else _by_channel)(q, k, g)
    q, k = (_per_value_head(x, repeats) for x in (q, k))
    # Inside a chunk each token's write depends on all before it: one triangular system per chunk
    # gives what would be written from a zero state, and how a real one changes that.
    system = system.mul_(rate)
    new_v, reads = _solve(system, v.mul_(rate)), _solve(system, k * (decay * rate))
    writes = (k * to_end).transpose(-1, -2)
    over = decay[:, :, -1].unsqueeze(-1)
    starts, final = _scan(grid, over, writes, reads=reads, new_v=new_v, initial=initial)
    o = ((q * decay) @ starts).add_(attention @ new_v)
    o = grid.collect(o).mul_(q.shape[-1] ** -0.5)
    return o, final, grid.exported(starts, final)


def _by_head(q: Tensor, k: Tensor, g: Tensor) -> Pairs:
    """Decays [chunks, Hv, C], the same for all channels: every pair of tokens has one factor."""
    repeats = g.shape[1] // k.shape[1]
    # Strong decays add up to thousands; float32 would blur the difference of two neighbours there.
    log_decay = g.cumsum(-1, dtype=torch.float64).mul_(LOG2_E)
    keys = k.transpose(-1, -2)
    # Decay from token j to token i of a chunk. Above the diagonal nobody reads it, but unclamped it
    # would overflow.
    pairs = (log_decay.unsqueeze(-1) - log_decay.unsqueeze(-2)).float().clamp_(max=0).exp2_()
    attention = (_per_value_head(q @ keys, repeats) * pairs).tril_()
    system = pairs.mul_(_per_value_head(k @ keys, repeats))
    decay = log_decay.exp2().float().unsqueeze(-1)
    to_end = (log_decay[..., -1:] - log_decay).exp2_().float().unsqueeze(-1)
    return attention, system, decay, to_end


def _by_channel(q: Tensor, k: Tensor, g: Tensor) -> Pairs:
    """Decays [chunks, Hv, C, dk]: products of blocks of 1, 2, 4, ... tokens with the block after.

    Decays meet at the border between the two, so no factor is above 1 and none overflows, however
    strong they are; they are products of decays, so none is a small difference of large sums.

        rows of the later block     q_i * (decay from the border to i)
        columns of the earlier one  k_j * (decay from j to the border)
    """
    repeats = g.shape[1] // k.shape[1]
    q, k = (_per_value_head(x, repeats) for x in (q, k))
    decay = g.mul_(LOG2_E).exp2_()  # from the start of each token's block
    to_end = torch.ones_like(decay)  # to the end of it
    attention = torch.linalg.vecdot(q, k).diag_embed()
    system = torch.zeros_like(attention)
    half, pairs = 1, q.shape[2] // 2
    while pairs:
        (k_first, k_then), (_, q_then) = _halves(k, half), _halves(q, half)
        (before, after), (rest, _) = _halves(decay, half), _halves(to_end, half)
        columns = (k_first * rest).transpose(-1, -2)
        for matrix, rows in ((attention, q_then), (system, k_then)):
            blocks = matrix.view(*q.shape[:2], pairs, 2, half, pairs, 2, half)
            # Of all blocks, those beside the diagonal: [chunks, Hv, half, half, pairs].
            corner = blocks[:, :, :, 1, :, :, 0].diagonal(dim1=2, dim2=4)
            corner.copy_(((rows * after) @ columns).movedim(2, -1))
        # The two become one block. `rest` first: it needs `after` as it is.
        rest.mul_(after[..., -1:, :])
        after.mul_(before[..., -1:, :])
        half, pairs = 2 * half, pairs // 2
    return attention, system, decay, to_end


def _halves(x: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """Of x [chunks, H, C, D] each run of `half` tokens and the run after it, as views.

    Both are [chunks, H, C / (2 * half), half, D].
    """
    first, then = x.view(*x.shape[:2], -1, 2, half, x.shape[3]).unbind(3)
    return first, then


def _unit_(x: Tensor) -> Tensor:
    """Divides x by its length over the last dimension, IN PLACE."""
    length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x.div_(length.hypot_(_floor(x.device)))


@cache
def _floor(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.full((1,), NORM_EPS**0.5, device=device)


def _per_value_head(x: Tensor, repeats: int) -> Tensor:
    return x if repeats == 1 else x.repeat_interleave(repeats, dim=1)


def _solve(system: Tensor, right: Tensor) -> Tensor:
    """(I + strictly lower part of `system`)^-1 `right`, contiguous.

    Solved as its transpose: the library wants column-major matrices, and so nothing is copied.
    """
    solved: Tensor = torch.linalg.solve_triangular(
        system.mT, right.mT, upper=True, left=False, unitriangular=True
    )
    return solved.mT.contiguous()


def _scan(
    grid: ChunkGrid,
    decay: Tensor,
    writes: Tensor,
    *,
    reads: Tensor,
    new_v: Tensor,
    initial: Tensor,
) -> tuple[Tensor, Tensor]:
    """Carries the state over chunks; turns `new_v` IN PLACE from a zero start to the real one.

    Returns the state at the start of each chunk [chunks, H, dk, dv] and the final states.
    """
    decay, writes, reads, flat_v = (x.flatten(0, 1) for x in (decay, writes, reads, new_v))
    state = grid.sort(initial).flatten(0, 1)
    heads = initial.shape[1]
    starts = state.new_empty(new_v.shape[0] * heads, *initial.shape[2:])
    final = torch.empty_like(state)
    first = 0
    # Sorted as in `ChunkGrid`: at each step the first `active` segments have a chunk. One that has
    # ended keeps its last state in `final`, since later steps write fewer rows.
    for active in grid.active:
        rows = slice(first, first + active * heads)
        state = state[: active * heads]
        starts[rows] = state
        values = flat_v[rows].baddbmm_(reads[rows], state, alpha=-1)
        state = (state * decay[rows]).baddbmm_(writes[rows], values)
        final[: active * heads] = state
        first = rows.stop
    shape = initial.shape[1:]
    return starts.view(-1, *shape), grid.unsort(final.view(-1, *shape))
