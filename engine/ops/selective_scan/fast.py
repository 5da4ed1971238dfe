"""The selective scan (Mamba-1) in blocks of few tokens, and an in-place step for decode.

`step` and `chunk` have the signatures of `naive.py`; operands are converted to float32.

Every number of a state decays by its own factor, so that there is no product over many tokens as
there is for Mamba-2. A scan of all chunks at once would compute each factor twice, and they are
most of the work. So a segment is scanned in order, by blocks that stay in a core's cache: factors
and inputs of a block's tokens in one operation each, then one operation per token. No power is
ever inverted and no sum of logarithms formed, so nothing overflows, and rounding is that of the
plain recurrence. Neither the other segments of a batch nor exports change a bit.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.chunk_grid import LOG2_E
from engine.ops.state_pool import move_states

# Numbers of all states of a block: 1 MiB of states, and as much of factors. Of 5,120 and 8,192
# channels of 16 numbers, larger ones cost up to three times as much per token on a CPU.
BLOCK = 1 << 18


def selective_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, pool: Tensor, index: StateIndex
) -> Tensor:
    """See `backend.SelectiveScan`."""

    def one(rows: Sequence[Tensor], state: Tensor) -> Tensor:
        x, dt, b, c = rows
        return step(x, dt, a, b, c, state)

    def many(
        rows: Sequence[Tensor], initial: Tensor, lens: list[int], exports: list[tuple[int, int]]
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, dt, b, c = rows
        return chunk(x, dt, a, b, c, query_lens=lens, initial=initial, exports=exports)

    return move_states([x, dt, b, c], pool, index, one, many)


def step(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor) -> Tensor:
    """One token of every sequence; `state` float32 [S, N, D], strided by S, changes IN PLACE.

    x and dt [S, D] (dt float32, after softplus), a float32 [N, D] (negative), b and c [S, N].
    Returns y [S, D], float32.
    """
    powers, push = (dt * LOG2_E).unsqueeze(1), (x * dt).unsqueeze(1)
    b, c = b.float().unsqueeze(2), c.float().unsqueeze(1)
    y = torch.empty_like(push)
    size = _per_block(a)
    # The states of many sequences do not fit into a cache; those of a block go through it once.
    for start in range(0, x.shape[0], size):
        rows = slice(start, start + size)
        own = state[rows]
        own.mul_((powers[rows] * a).exp2_()).addcmul_(push[rows], b[rows])
        torch.bmm(c[rows], own, out=y[rows])
    return y.squeeze(1)


def chunk(
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
    """Segments end to end: as `step`, T = sum(query_lens) rows; `initial` is not changed.

    `exports`: (segment, tokens of it), ascending. Returns y [T, D], the final states and the states
    at the exports [E, N, D], all float32.
    """
    powers, push = (dt * LOG2_E).unsqueeze(1), (x * dt).unsqueeze(1)
    b, c = b.float().unsqueeze(2), c.float().unsqueeze(1)
    y = torch.empty_like(push)
    final = initial.clone()
    exported = [initial[:0]]
    size = min(_per_block(a), max(query_lens))
    decays, states = a.new_empty(2, size, *a.shape)
    start = 0
    for segment, length in enumerate(query_lens):
        state = final[segment]
        for first in range(0, length, size):
            last = min(first + size, length)
            rows, number = slice(start + first, start + last), last - first
            decay = torch.mul(powers[rows], a, out=decays[:number]).exp2_()
            after = torch.mul(push[rows], b[rows], out=states[:number])
            _scan(state, decay, after)
            torch.bmm(c[rows], after, out=y[rows])
            inside = (offset for owner, offset in exports if owner == segment)
            exported += [
                after[offset - first - 1].unsqueeze(0).clone()
                for offset in inside
                if first < offset <= last
            ]
            # The next block takes the place of this one's states.
            state.copy_(after[-1])
        start += length
    return y.squeeze(1), final, torch.cat(exported)


def _scan(state: Tensor, decay: Tensor, after: Tensor) -> None:
    """From what every token adds, `after` [n, N, D], to the states after it, IN PLACE."""
    for here, factor in zip(after.unbind(), decay.unbind(), strict=True):
        state = here.addcmul_(state, factor)


def _per_block(a: Tensor) -> int:
    """States [N, D] of a block."""
    return max(1, BLOCK // a.numel())
