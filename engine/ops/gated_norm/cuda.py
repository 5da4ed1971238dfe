"""Norms with a gate on a CUDA device: one pass over a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.model_configs.recurrent import Gating
from engine.ops.activation.cuda import FUNCTIONS, product
from engine.ops.norm.cuda import run_tiles, warps_of


# The number of runs changes from step to step: no kernel of its own for each kind of number.
@triton.jit(do_not_specialize=["runs"])
def gated_norm_kernel(
    y,
    gate,
    weight,
    result,
    runs,
    eps,
    y_row,
    y_channel,
    gate_row,
    gate_channel,
    weight_group,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    RUNS: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    SILU: tl.constexpr,
):
    """RUNS runs of SIZE channels, each normed by itself; a row has GROUPS of them."""
    run = tl.program_id(0).to(tl.int64) * RUNS + tl.arange(0, RUNS)[:, None]
    row, group = run // GROUPS, run % GROUPS
    within = tl.arange(0, WIDTH)[None, :]
    channel = group * SIZE + within
    mask = (run < runs) & (within < SIZE)
    z = tl.load(gate + row * gate_row + channel * gate_channel, mask=mask, other=0.0)
    z = z.to(tl.float32)
    factor = tl.sigmoid(z)
    if SILU:
        factor *= z
    found = tl.load(y + row * y_row + channel * y_channel, mask=mask, other=0.0)
    if GATE_FIRST:
        found *= factor
    mean = tl.sum(found * found, 1, keep_dims=True) / SIZE
    found = found / tl.sqrt(mean + eps)
    found *= tl.load(weight + group * weight_group + within, mask=mask, other=0.0)
    if not GATE_FIRST:
        found *= factor
    tl.store(result + run * SIZE + within, found.to(result.dtype.element_ty), mask=mask)


class CudaGatedNorm:
    """See `backend.MakeGatedNorm`; y stays as it is."""

    def __init__(self, weight: Tensor | None, eps: float, *, gating: Gating) -> None:
        self._weight = None if weight is None else weight.float().contiguous()
        self._eps = eps
        self._silu = gating is not Gating.NORM_THEN_SIGMOID
        self._gate_first = gating is Gating.GATE_THEN_NORM

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor:
        flat, weight = y.reshape(gate.shape), self._weight
        if weight is None:
            name = Activation.SILU if self._silu else "sigmoid"
            return product(FUNCTIONS[name], gate, flat, dtype=gate.dtype)
        result = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        size = weight.shape[-1]
        groups = gate.shape[1] // size
        runs, width, at_once = run_tiles(gate.shape[0] * groups, size)
        gated_norm_kernel[triton.cdiv(runs, at_once),](
            flat,
            gate,
            weight,
            result,
            runs,
            self._eps,
            *flat.stride(),
            *gate.stride(),
            size if weight.dim() == 2 else 0,
            GROUPS=groups,
            SIZE=size,
            WIDTH=width,
            RUNS=at_once,
            GATE_FIRST=self._gate_first,
            SILU=self._silu,
            num_warps=warps_of(width * at_once),
        )
        return result
