"""The operators of each kind of device, in one table. Layers take theirs when they are built.

Another backend is another column: a function that returns `Ops`. The truth that any of them is
tested against is `naive.py` beside each operator.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from engine.compute_config import KernelChoice
from engine.forward import AttentionCache, AttentionIndex, StateIndex
from engine.native.kernels import Kernels, load_kernels
from engine.ops.causal_conv1d.fast import causal_conv1d
from engine.ops.experts.fast import experts
from engine.ops.gated_delta_rule.fast import gated_delta_rule
from engine.ops.linear import native as native_linear
from engine.ops.linear.fast import TorchLinear
from engine.ops.paged_attention.fast import paged_attention
from engine.ops.scratch import Scratch
from engine.ops.selective_scan.fast import selective_scan
from engine.ops.ssd.fast import ssd


class Product(Protocol):
    """y = x W^T + b: x [T, in] -> [T, out], added to `residual` [T, out] in the same call.

    All have the dtype of the matrix; sums are float32.
    """

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class MakeProduct(Protocol):
    """Of weight [out, in] and bias [out] or None; it may keep the matrix in another order."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Product: ...


class PagedAttention(Protocol):
    """Writes the batch's K and V into their pages, then attends causally.

    q [T, H, D], k and v [T, Hkv, D] -> [T, H * D]; v None: k is V too, as in its pages. A token
    reads itself and the `window` - 1 tokens before it (None: all); scores are q k^T * `scale`.
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor | None,
        cache: AttentionCache,
        index: AttentionIndex,
        *,
        scale: float,
        window: int | None,
    ) -> Tensor: ...


class CausalConv1d(Protocol):
    """Depthwise causal convolution and, with `silu`, SiLU: x [T, D], weight [K, D] -> [T, D].

    bias [D] or None. A state is the last K-1 inputs [K-1, D]; sums are float32, the result has the
    dtype of x.
    """

    def __call__(
        self,
        x: Tensor,
        pool: Tensor,
        index: StateIndex,
        weight: Tensor,
        bias: Tensor | None,
        *,
        silu: bool = True,
    ) -> Tensor: ...


class GatedDeltaRule(Protocol):
    """arXiv 2412.06464 and 2510.26692: q, k [T, Hk, dk], v [T, Hv, dv], beta float32 [T, Hv].

    `g` float32 is the log of the decay by head [T, Hv] or by key channel [T, Hv, dk]; q and k are
    normed here. A state is float32 [Hv, dk, dv]. Returns float32 [T, Hv, dv].
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        pool: Tensor,
        index: StateIndex,
    ) -> Tensor: ...


class SelectiveScan(Protocol):
    """Mamba1, arXiv 2312.00752: x [T, D], dt float32 [T, D], a float32 [N, D], b and c [T, N].

    dt is after softplus, a is negative. A state is float32 [N, D]: with the channels side by side
    each operation runs over long rows. Returns float32 [T, D].
    """

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        pool: Tensor,
        index: StateIndex,
    ) -> Tensor: ...


class StateSpaceDuality(Protocol):
    """Mamba2 (Dao & Gu 2024): x [T, H, P], dt float32 [T, H], a [H], b and c [T, G, N].

    dt is after softplus, a is negative. A state is [H, P, N], computed in float32. Returns float32
    [T, H, P].
    """

    def __call__(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        pool: Tensor,
        index: StateIndex,
    ) -> Tensor: ...


class MixtureOfExperts(Protocol):
    """Every token through its experts: x [T, D], chosen int64 [T, k], shares float32 [T, k].

    up [E, D, U] and down [E, I, D] are products from the right; `activation` takes [n, U] to
    [n, I]. Returns the sum of share * down(activation(up(x))) over a token's experts, float32
    [T, D].
    """

    def __call__(
        self,
        x: Tensor,
        chosen: Tensor,
        shares: Tensor,
        up: Tensor,
        down: Tensor,
        *,
        activation: Callable[[Tensor], Tensor],
    ) -> Tensor: ...


@dataclass(slots=True, frozen=True, kw_only=True)
class Ops:
    """One column of the table; `kernels` is its name in a model's identity.

    A `pool` [units, ...] holds one kind of state of a layer, by unit; the batch's states in it move
    on in place.
    """

    kernels: str
    linear: MakeProduct
    paged_attention: PagedAttention
    causal_conv1d: CausalConv1d
    gated_delta_rule: GatedDeltaRule
    selective_scan: SelectiveScan
    ssd: StateSpaceDuality
    experts: MixtureOfExperts


def torch_ops() -> Ops:
    """Torch's own operators: right on any device. All layers share temporaries."""
    scratch = Scratch()
    return Ops(
        kernels="torch",
        linear=TorchLinear,
        paged_attention=partial(paged_attention, scratch=scratch),
        causal_conv1d=causal_conv1d,
        gated_delta_rule=partial(gated_delta_rule, scratch=scratch),
        selective_scan=selective_scan,
        ssd=ssd,
        experts=experts,
    )


def native_ops(kernels: Kernels) -> Ops:
    """Those of torch, but for what the native kernels do faster on a CPU."""

    def linear(weight: Tensor, bias: Tensor | None = None) -> Product:
        if not native_linear.is_suited(weight):
            return TorchLinear(weight, bias)
        return native_linear.NativeLinear(kernels, weight, bias)

    return replace(torch_ops(), kernels="native", linear=linear)


def ops_for(device: torch.device, dtype: torch.dtype, *, kernels: KernelChoice) -> Ops:
    """The operators of a model of `dtype` on `device`; one table for all of its layers.

    `auto` takes the native kernels where they run: on some CPUs.
    """
    found = None
    if kernels == "auto" and device.type == "cpu":
        found = load_kernels(dtype)
    return torch_ops() if found is None else native_ops(found)
