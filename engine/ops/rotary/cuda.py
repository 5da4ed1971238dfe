"""Rotary embedding on a CUDA device: in one pass, in place."""

import triton
import triton.language as tl
from torch import Tensor

NUMBERS = 2048
"""Pairs of channels that one program turns, about."""


@triton.jit
def rotate_kernel(
    x,
    rotary,
    x_row,
    x_head,
    x_channel,
    rotary_part,
    rotary_row,
    rotary_channel,
    HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HEAD_TILE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """HEAD_TILE heads of one token: channel i < HALF with i + HALF, and no other channel."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEAD_TILE + tl.arange(0, HEAD_TILE)[:, None]
    i = tl.arange(0, WIDTH)[None, :]
    is_pair = i < HALF
    mask = (head < HEADS) & is_pair
    first_at = x + row * x_row + head * x_head + i * x_channel
    second_at = first_at + HALF * x_channel
    first = tl.load(first_at, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(second_at, mask=mask, other=0.0).to(tl.float32)
    # The table [2, T, 1, 2 HALF] has the sign of the sine in its first half.
    cos_at = rotary + row * rotary_row + i * rotary_channel
    sin_at = cos_at + rotary_part
    other = HALF * rotary_channel
    cos = tl.load(cos_at, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_at, mask=is_pair, other=0.0).to(tl.float32)
    turned = first * cos + second * sin
    tl.store(first_at, turned.to(x.dtype.element_ty), mask=mask)
    cos = tl.load(cos_at + other, mask=is_pair, other=0.0).to(tl.float32)
    sin = tl.load(sin_at + other, mask=is_pair, other=0.0).to(tl.float32)
    turned = second * cos + first * sin
    tl.store(second_at, turned.to(x.dtype.element_ty), mask=mask)


def rotate_(x: Tensor, rotary: Tensor) -> None:
    """See `backend.Rotate`."""
    rows, heads, _ = x.shape
    half = rotary.shape[3] // 2
    width = triton.next_power_of_2(half)
    tile = min(triton.next_power_of_2(heads), max(1, NUMBERS // width))
    part, row, _, channel = rotary.stride()
    rotate_kernel[rows, triton.cdiv(heads, tile)](
        x,
        rotary,
        *x.stride(),
        part,
        row,
        channel,
        HEADS=heads,
        HALF=half,
        HEAD_TILE=tile,
        WIDTH=width,
    )
