"""State space duality (Mamba-2): matrix products over chunks, and an in-place step for decode.

`ssd_step` and `ssd_chunk` have the signatures of `naive.py`. The chunk form is the block
decomposition of Dao & Gu 2024, section 6: products inside chunks, a short recurrence over them.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import inf

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.chunk_grid import LOG2_E, ChunkGrid
from engine.ops.ssd.parameters import SSDParameters
from engine.ops.state_pool import Chunk, move_states


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
    a = parameters.a

    def step(rows: Sequence[Tensor], state: Tensor) -> Tensor:
        x, dt, b, c = rows
        return ssd_step(x, dt, a, b, c, state)

    rows = [x, time_steps(x, dt, parameters), b, c]
    y = move_states(rows, pool, index, step, chunk_with(a), wide=True)
    return y if parameters.d is None else y.addcmul_(x, parameters.d.unsqueeze(-1))


def chunk_with(a: Tensor) -> Chunk:
    """`ssd_chunk` as a `state_pool.Chunk`: rows are x, dt after softplus, b and c."""

    def chunk(
        rows: Sequence[Tensor], initial: Tensor, lens: list[int], exports: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, dt, b, c = rows
        return ssd_chunk(x, dt, a, b, c, query_lens=lens, initial=initial, exports=exports)

    return chunk


def time_steps(x: Tensor, dt: Tensor | None, parameters: SSDParameters) -> Tensor:
    """float32 [T, H]: dt after softplus, within its limits; ones without a dt."""
    if dt is None:
        return torch.ones(x.shape[:2], device=x.device)
    bias = parameters.dt_bias
    steps = F.softplus(dt.float() if bias is None else dt + bias)
    low, high = parameters.limits
    return steps.clamp_(low, high) if low > 0.0 or high != inf else steps


def ssd_step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One token of every sequence; `state` float32 [S, H, P, N], any stride, is updated IN PLACE.

    x [S, H, P], dt float32 [S, H] (after softplus), a [H] (negative), b and c [S, G, N]; head h
    uses group h // (H / G). Returns y [S, H, P], float32.
    """
    seqs, heads, head_dim, state_size = state.shape
    groups = b.shape[1]
    # h = exp(dt a) h + (dt x) b^T;  y = h c. Heads of a group share b and c.
    push = (x * dt[:, :, None]).view(seqs, groups, -1, 1)
    by_group = state.view(seqs, groups, -1, state_size)
    state.mul_(torch.exp(dt * a)[:, :, None, None])
    by_group.addcmul_(push, b.float()[:, :, None, :])
    return _read(by_group, c.float()).view(seqs, heads, head_dim)


def _read(by_group: Tensor, c: Tensor) -> Tensor:
    """[S, G, rows, N] times [S, G, N] -> G * rows numbers for each sequence.

    A row vector times the transposed state: the other way round, batched products are 7x slower on
    CPU. One product per group or per sequence, whichever are fewer, since a state that is strided
    by unit must not be copied.
    """
    if c.shape[0] < c.shape[1]:
        pairs = zip(c.unsqueeze(2), by_group.transpose(2, 3), strict=True)
        return torch.stack([torch.bmm(query, state) for query, state in pairs])
    parts = [
        torch.bmm(c[:, group : group + 1], by_group[:, group].transpose(1, 2))
        for group in range(c.shape[1])
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def ssd_chunk(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    *,
    query_lens: list[int],
    initial: Tensor,
    exports: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments end to end: x [T, H, P], dt float32 [T, H], a [H], b and c [T, G, N].

    T = sum(query_lens); `initial` float32 [S, H, P, N] is not changed. `exports`: (segment, tokens
    of it), ascending. Returns y [T, H, P], the final states and the states at the exports
    [E, H, P, N], all float32.
    """
    # y of a token = (state before its chunk, decayed up to it) + (earlier tokens of its chunk):
    # matrix products over all chunks at once, but for the states, which pass from chunk to chunk.
    grid = ChunkGrid.over(query_lens, x.device, exports)
    # Sums reach hundreds and differences near zero matter: float32 would lose four digits.
    decay = grid.spread(dt * a).cumsum(-1, dtype=torch.float64).mul_(LOG2_E)
    push, keys, queries = (grid.spread(part) for part in (x * dt[:, :, None], b, c))
    own = _chunk_states(decay, push, keys)
    from_start = decay.exp2().float()
    before, final = _across_chunks(from_start[..., -1], own, grid, initial)
    y = _from_before(before, queries).mul_(from_start.transpose(1, 2)[..., None])
    y += _inside_chunks(decay, push, keys, queries).transpose(1, 2)
    return grid.collect(y.transpose(1, 2)), final, grid.exported(before, final)


def _inside_chunks(decay: Tensor, push: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """The contribution of tokens of the same chunk: [C, H, L, P].

    decay float64 [C, H, L] in powers of 2, push [C, H, L, P], keys and queries [C, G, L, N].
    Differences of decay above the diagonal are positive and must not overflow; the score there is
    zero.
    """
    chunks, groups, length, _ = keys.shape
    # Token i reads token j <= i:  y_i += (c_i . b_j) exp(decay_i - decay_j) (dt x)_j
    scores = (queries @ keys.transpose(2, 3)).tril_()
    weights = (decay[..., :, None] - decay[..., None, :]).float().clamp_max_(0.0).exp2_()
    weights.view(chunks, groups, -1, length, length).mul_(scores[:, :, None])
    return weights @ push


def _chunk_states(decay: Tensor, push: Tensor, keys: Tensor) -> Tensor:
    """The part of the state at each chunk's end that the chunk itself adds: [C, H, P, N]."""
    chunks, groups, length, state_size = keys.shape
    heads, head_dim = push.shape[1], push.shape[3]
    # A token's contribution decays from its position to the end of the chunk.
    left = (decay[..., -1:] - decay).exp2_().float()
    weighted = (push * left[..., None]).transpose(2, 3).reshape(chunks, groups, -1, length)
    return (weighted @ keys).view(chunks, heads, head_dim, state_size)


def _across_chunks(
    total: Tensor, own: Tensor, grid: ChunkGrid, initial: Tensor
) -> tuple[Tensor, Tensor]:
    """The recurrence over chunks: total decay [C, H] and own contribution [C, H, P, N] of each.

    Returns the state before every chunk [C, H, P, N] (in the memory of `own`) and the final states.
    """
    state = grid.sort(initial)
    final = torch.empty_like(state)
    factors = total[:, :, None, None]
    first = 0
    # Segments are sorted by number of chunks, so those that go on are the first `left` of `active`:
    #
    #   step 0   A B C     active = 3, left = 2: C ends here
    #   step 1   A B       active = 2, left = 1: B ends
    #   step 2   A
    for active, left in pairwise([*grid.active, 0]):
        rows = slice(first, first + active)
        after = torch.addcmul(own[rows], state, factors[rows])
        # What a chunk adds is used up: its place takes the state before the chunk.
        own[rows] = state
        final[left:active] = after[left:]
        state = after[:left]
        first = rows.stop
    return own, grid.unsort(final)


def _from_before(before: Tensor, queries: Tensor) -> Tensor:
    """The contribution of the state before a chunk to its tokens, not yet decayed: [C, L, H, P]."""
    chunks, heads, head_dim, state_size = before.shape
    groups, length = queries.shape[1:3]
    y = queries @ before.view(chunks, groups, -1, state_size).transpose(2, 3)
    return y.transpose(1, 2).reshape(chunks, length, heads, head_dim)
