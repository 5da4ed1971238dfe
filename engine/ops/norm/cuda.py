"""Root-mean-square norms on a CUDA device: a row is read once and written once."""

import torch
import triton
import triton.language as tl
from torch import Tensor


# The number of runs changes from step to step: no kernel of its own for each kind of number.
@triton.jit(do_not_specialize=["runs"])
def norm_kernel(
    x,
    weight,
    residual,
    y,
    runs,
    eps,
    x_row,
    x_group,
    x_channel,
    residual_row,
    residual_group,
    residual_channel,
    weight_group,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
):
    """RUNS runs of SIZE channels, each normed by itself; a row has GROUPS of them."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)[:, None]
    row, group = run // GROUPS, run % GROUPS
    channel = tl.arange(0, WIDTH)[None, :]
    mask = (run < runs) & (channel < SIZE)
    x_at = x + row * x_row + group * x_group + channel * x_channel
    wide = tl.load(x_at, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(wide * wide, 1, keep_dims=True) / SIZE
    found = wide / tl.sqrt(mean + eps)
    found *= tl.load(weight + group * weight_group + channel, mask=mask, other=0.0)
    if HAS_RESIDUAL:
        at = residual + row * residual_row + group * residual_group + channel * residual_channel
        found += tl.load(at, mask=mask, other=0.0).to(tl.float32)
    tl.store(y + run * SIZE + channel, found.to(y.dtype.element_ty), mask=mask)


class CudaNorm:
    """See `backend.MakeNorm`."""

    def __init__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight.float().contiguous()
        self._eps = eps
        self._dtype = dtype
        self._size = weight.shape[-1]
        self._weight_group = self._size if weight.dim() == 2 else 0

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        y = torch.empty(x.shape, dtype=self._dtype, device=x.device)
        groups = 1 if x.dim() == 2 else x.shape[1]
        runs, width, at_once = run_tiles(x.shape[0] * groups, self._size)
        added = y if residual is None else residual
        norm_kernel[triton.cdiv(runs, at_once),](
            x,
            self._weight,
            added,
            y,
            runs,
            self._eps,
            *_strides(x),
            *_strides(added),
            self._weight_group,
            GROUPS=groups,
            SIZE=self._size,
            WIDTH=width,
            RUNS=at_once,
            HAS_RESIDUAL=residual is not None,
            num_warps=warps_of(width * at_once),
        )
        return y


def run_tiles(runs: int, size: int) -> tuple[int, int, int]:
    """`runs`, the power of two that holds `size`, and the runs that one program takes.

    Heads are short: several make a program's work. Their number follows from their size alone, and
    so does the order of every sum.
    """
    width = triton.next_power_of_2(size)
    return runs, width, max(1, 1024 // width)


def warps_of(numbers: int) -> int:
    """Warps of a program that works on so many numbers: eight of them or more for each thread."""
    return min(16, max(4, numbers // 512))


def _strides(x: Tensor) -> tuple[int, int, int]:
    """Of rows, groups and channels of [T, D] or [T, G, D]."""
    return x.stride(0), x.stride(1) if x.dim() == 3 else 0, x.stride(-1)
