"""A function of one tensor, times another, plus a third, on a CUDA device: in one pass."""

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model_configs.feed_forward import Activation

FUNCTIONS: Mapping[str, int] = MappingProxyType(
    {
        Activation.SILU: 0,
        Activation.GELU_TANH: 1,
        Activation.RELU2: 2,
        "sigmoid": 3,
        "identity": 4,
    }
)
"""Numbers of the functions in the kernel."""

CHANNELS = 1024
"""Of one program at most: a thread's are one vector of 16 bytes in 16 bits."""


@triton.jit
def product_kernel(
    x,
    up,
    residual,
    y,
    x_row,
    x_channel,
    up_row,
    up_channel,
    residual_row,
    residual_channel,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    FUNCTION: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """y [T, SIZE] = function(x) * up + residual, in float32; WIDTH channels of one row."""
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    mask = channel < SIZE
    found = tl.load(x + row * x_row + channel * x_channel, mask=mask, other=0.0).to(tl.float32)
    if FUNCTION == 0:
        found = found * tl.sigmoid(found)
    elif FUNCTION == 1:
        # 0.5 (1 + tanh(z)) is sigmoid(2 z), but without what the sum cancels; 2 sqrt(2 / pi).
        cubed = found * found * found
        found = found * tl.sigmoid(1.5957691216057308 * (found + 0.044715 * cubed))
    elif FUNCTION == 2:
        # Not by a maximum, which on a device drops NaN.
        found = tl.where(found < 0.0, 0.0, found * found)
    elif FUNCTION == 3:
        found = tl.sigmoid(found)
    if HAS_UP:
        up_at = up + row * up_row + channel * up_channel
        found *= tl.load(up_at, mask=mask, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row * residual_row + channel * residual_channel
        found += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + row * SIZE + channel, found.to(y.dtype.element_ty), mask=mask)


def product(
    function: int,
    x: Tensor,
    up: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    dtype: torch.dtype,
) -> Tensor:
    """function(x) * up + residual, of [T, C] each with any strides, to [T, C] of `dtype`.

    `function`: of `FUNCTIONS`. One of x and up may be [T, 1]: one number for all channels.
    """
    rows, size = x.shape[0], max(x.shape[1], 1 if up is None else up.shape[1])
    y = torch.empty((rows, size), dtype=dtype, device=x.device)
    # What is left out is never read.
    factor, added = (y if one is None else one for one in (up, residual))
    width = min(CHANNELS, triton.next_power_of_2(size))
    product_kernel[rows, triton.cdiv(size, width)](
        x,
        factor,
        added,
        y,
        *_strides(x, size),
        *_strides(factor, size),
        *_strides(added, size),
        SIZE=size,
        WIDTH=width,
        FUNCTION=function,
        HAS_UP=up is not None,
        HAS_RESIDUAL=residual is not None,
    )
    return y


def make_activation(kind: Activation, *, gated: bool) -> Callable[[Tensor], Tensor]:
    """See `backend.MakeActivation`."""
    return partial(_activate, FUNCTIONS[kind], gated=gated)


def _activate(function: int, x: Tensor, *, gated: bool) -> Tensor:
    gate, up = x.chunk(2, dim=-1) if gated else (x, None)
    return product(function, gate, up, dtype=x.dtype)


def _strides(x: Tensor, size: int) -> tuple[int, int]:
    """Of rows and of channels, where one channel may stand for all."""
    return x.stride(0), x.stride(1) if x.shape[1] == size else 0
