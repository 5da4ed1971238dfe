"""Depthwise causal convolution as K shifted multiply-adds over token-major rows.

`conv_step` and `conv_chunk` have the signatures of `naive.py`.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.forward import StateIndex
from engine.ops.state_pool import move_states

# Rows handled at a time: a block of a few hundred channels stays in a core's second-level cache.
ROWS = 128


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
    return move_states(
        [x],
        pool,
        index,
        lambda rows, state: conv_step(rows[0], state, weight, bias, silu=silu),
        lambda rows, initial, lens, exports: conv_chunk(
            rows[0], lens, initial, weight, bias, exports=exports, silu=silu
        ),
    )


def conv_step(
    x: Tensor, state: Tensor, weight: Tensor, bias: Tensor | None, *, silu: bool = True
) -> Tensor:
    """One token of every sequence: x [S, D], state [S, K-1, D] (updated IN PLACE), weight [K, D].

    Returns the convolution [S, D], through SiLU with `silu`, in the dtype of x; sums are float32.
    """
    rows = [*state.unbind(1), x]
    first, *others = weight.float().unbind()
    y = rows[0].float() * first
    for row, tap in zip(rows[1:], others, strict=True):
        y.addcmul_(row.float(), tap)
    if bias is not None:
        y += bias.float()
    # Shift by one: the oldest input goes, the new one comes. From the front, so each row is read
    # before it is overwritten.
    for older, newer in pairwise(rows):
        older.copy_(newer)
    return (F.silu(y, inplace=True) if silu else y).to(x.dtype)


def conv_chunk(
    x: Tensor,
    query_lens: list[int],
    initial: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    exports: Sequence[tuple[int, int]] = (),
    silu: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Segments end to end: x [T, D], T = sum(query_lens), initial [S, K-1, D], weight [K, D].

    `exports`: (segment, tokens of it), ascending. Returns the convolution [T, D], through SiLU with
    `silu`, the final states [S, K-1, D] and the states at the exports [E, K-1, D]; `initial` is not
    changed.
    """
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    final = torch.empty_like(initial)
    exported = [initial[:0]]
    taps = weight.float()
    start = 0
    for segment, length in enumerate(query_lens):
        rows = x[start : start + length]
        out = y[start : start + length]
        _convolve(rows, initial[segment], taps, bias, out, silu=silu)
        final[segment] = _last_rows(initial[segment], rows, length)
        offsets = (offset for owner, offset in exports if owner == segment)
        exported += [_last_rows(initial[segment], rows, end).unsqueeze(0) for end in offsets]
        start += length
    return y.to(x.dtype), final, torch.cat(exported)


def _last_rows(initial: Tensor, rows: Tensor, end: int) -> Tensor:
    """The K-1 inputs before row `end`, those of `initial` [K-1, D] included: [K-1, D]."""
    before = initial.shape[0]
    window = torch.cat([initial, rows[max(0, end - before) : end]])
    return window[window.shape[0] - before :]


def _convolve(
    x: Tensor,
    initial: Tensor,
    taps: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    silu: bool,
) -> None:
    """out [T, D] = bias + sum over taps of x [T, D] after initial [K-1, D], by blocks; SiLU."""
    before = initial.shape[0]
    for start in range(0, out.shape[0], ROWS):
        block = out[start : start + ROWS]
        rows = block.shape[0]
        # K-1 inputs before the block:  | before | rows of the block |
        if start:
            window = x[start - before : start + rows].float()
        else:
            window = torch.cat([initial, x[:rows]]).float()
        torch.mul(window[:rows], taps[0], out=block)
        for tap in range(1, taps.shape[0]):
            block.addcmul_(window[tap : tap + rows], taps[tap])
        if bias is not None:
            block += bias
        if silu:
            F.silu(block, inplace=True)
