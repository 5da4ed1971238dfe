"""The operators of each kind of device, in one table. Layers take theirs when they are built.

Another backend is another column: a function that returns `Ops`. The truth that any of them is
tested against is `naive.py` beside each operator; of the router it is `fast.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Protocol

import structlog
import torch
from torch import Tensor

from engine.compute_config import KernelChoice, Quantization
from engine.distribution import how_to_install
from engine.forward import AttentionCache, AttentionIndex, StateIndex
from engine.model_configs.feed_forward import Activation, RouterConfig
from engine.model_configs.recurrent import Gating
from engine.native.kernels import Kernels, load_kernels
from engine.ops.activation.fast import make_activation
from engine.ops.activation.native import NativeActivation
from engine.ops.causal_conv1d.fast import causal_conv1d
from engine.ops.causal_conv1d.native import NativeConv
from engine.ops.experts.fast import TorchExperts
from engine.ops.experts.native import NativeExperts
from engine.ops.gate.fast import gate
from engine.ops.gate.native import NativeGate
from engine.ops.gated_delta_rule.fast import gated_delta_rule
from engine.ops.gated_delta_rule.native import NativeDeltaRule
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.gated_norm.fast import TorchGatedNorm
from engine.ops.gated_norm.native import NativeGatedNorm
from engine.ops.linear import native as native_linear
from engine.ops.linear.fast import TorchInt8Linear, TorchLinear
from engine.ops.lookup.fast import lookup
from engine.ops.lookup.native import NativeLookup
from engine.ops.norm.fast import TorchNorm
from engine.ops.norm.native import NativeNorm
from engine.ops.paged_attention.fast import paged_attention
from engine.ops.paged_attention.native import NativeAttention
from engine.ops.rotary.fast import rotate_
from engine.ops.rotary.native import NativeRotate
from engine.ops.router.fast import TorchRouter
from engine.ops.router.native import NativeRouter
from engine.ops.scratch import Scratch
from engine.ops.selective_scan.fast import selective_scan
from engine.ops.ssd.fast import ssd
from engine.ops.ssd.native import NativeSSD
from engine.ops.ssd.parameters import SSDParameters

log = structlog.get_logger()


class Product(Protocol):
    """y = x W^T + b: x [T, in] -> [T, out], added to `residual` [T, out] in the same call.

    All have the dtype of the matrix; sums are float32.
    """

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class MakeProduct(Protocol):
    """Takes weight [out, in] and bias [out] or None; may keep the matrix in another order."""

    def __call__(self, weight: Tensor, bias: Tensor | None = None) -> Product: ...


class Norm(Protocol):
    """Root-mean-square norm, of x [T, D] or by group of x [T, G, D], to the same shape.

    Added to `residual` in the same call.
    """

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor: ...


class MakeNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight, for weight [D] or, for each group its own, [G, D].

    Computed in float32, whatever x is; the result has the dtype `dtype`, as has a residual.
    """

    def __call__(self, weight: Tensor, eps: float, dtype: torch.dtype) -> Norm: ...


class GatedNorm(Protocol):
    """y float32 [T, ...] of C channels in all, gate [T, C] -> [T, C], of the gate's dtype.

    y may be overwritten.
    """

    def __call__(self, y: Tensor, gate: Tensor) -> Tensor: ...


class MakeGatedNorm(Protocol):
    """Norm of y and gate in the order of `gating`, in float32; weight is None for GATE_ONLY.

    Each run of D channels is normed by itself: weight [D] for all of them, or [C / D, D].
    """

    def __call__(self, weight: Tensor | None, eps: float, *, gating: Gating) -> GatedNorm: ...


class MakeActivation(Protocol):
    """The function of an MLP: x [T, U] -> [T, U], or act(gate) * up of `gated` x [T, 2 I].

    Gate and up lie side by side, and give [T, I]. The result has the dtype of x.
    """

    def __call__(self, kind: Activation, *, gated: bool) -> Callable[[Tensor], Tensor]: ...


class Gate(Protocol):
    """x * sigmoid(by), or x * by without `sigmoid`, of x [T, C] and by [T, C] or [T, 1].

    Added to `residual` [T, C] in the same call; all have one dtype.
    """

    def __call__(
        self, x: Tensor, by: Tensor, residual: Tensor | None = None, *, sigmoid: bool = True
    ) -> Tensor: ...


class Rotate(Protocol):
    """Rotary embedding (arXiv 2104.09864) of x [T, H, D], IN PLACE: channel i pairs with i + half.

    `rotary` [2, T, 1, 2 * half], in the dtype of x or float32: cosines, and sines of which the
    first half is negated. Channels from 2 * half on stay.
    """

    def __call__(self, x: Tensor, rotary: Tensor) -> None: ...


class Lookup(Protocol):
    """table [N, ...] at rows int64 [T], times `scale` -> [T, ...] of `dtype`.

    The table is contiguous, and `dtype` is its own or float32.
    """

    def __call__(
        self, table: Tensor, rows: Tensor, dtype: torch.dtype, *, scale: float = 1.0
    ) -> Tensor: ...


class PagedAttention(Protocol):
    """Writes the batch's K and V into their pages, then attends causally.

    q [T, H, D], k and v [T, Hkv, D] -> [T, H * D]; v None: k is V too, as in its pages. A token
    reads itself and the `window` - 1 tokens before it (None: all); scores are q k^T * `scale`. The
    numbers of a head lie side by side.
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
    """arXiv 2412.06464 and 2510.26692: q, k [T, Hk, dk], v [T, Hv, dv], b [T, Hv].

    `a` makes the decays, by head [T, Hv] or by key channel [T, Hv, dk], `b` the rates of writing,
    as `parameters` say. All have the model's dtype; q and k are normed here. A state is float32
    [Hv, dk, dv]. Returns float32 [T, Hv, dv].
    """

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        pool: Tensor,
        index: StateIndex,
        *,
        parameters: DeltaRuleParameters,
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
    """Mamba2 (Dao & Gu 2024): x [T, H, P], dt [T, H], b and c [T, G, N], of the model's dtype.

    dt is before softplus; None: steps of one. A state is [H, P, N], computed in float32. Returns
    float32 [T, H, P], with the skip.
    """

    def __call__(
        self,
        x: Tensor,
        dt: Tensor | None,
        b: Tensor,
        c: Tensor,
        pool: Tensor,
        index: StateIndex,
        *,
        parameters: SSDParameters,
    ) -> Tensor: ...


class Router(Protocol):
    """x [T, in] -> the experts of each token, int64 [T, k], and their shares, float32 [T, k].

    A rounded score may choose another expert than an unrounded one, so all scores are float32.
    """

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


class MakeRouter(Protocol):
    """Takes matrix [count, in] and correction [count] or None, both float32."""

    def __call__(
        self, config: RouterConfig, matrix: Tensor, correction: Tensor | None
    ) -> Router: ...


class Mixture(Protocol):
    """Every token through its experts: x [T, D], chosen int64 [T, k], shares float32 [T, k].

    Returns the sum of share * down(activation(up(x))) over a token's experts, added to `residual`
    [T, D] in float32; then it is rounded to the dtype of x, which the residual has too.
    """

    def __call__(
        self, x: Tensor, chosen: Tensor, shares: Tensor, residual: Tensor | None = None
    ) -> Tensor: ...


class MakeMixture(Protocol):
    """Takes the experts' matrices up [E, U, D] and down [E, D, I], and keeps them in another order.

    `activation` takes U to I numbers, as `MakeActivation` says.
    """

    def __call__(
        self, up: Tensor, down: Tensor, *, activation: Activation, gated: bool
    ) -> Mixture: ...


class Replay(Protocol):
    """A recorded pass: the same kernels on the same addresses."""

    def replay(self) -> None: ...


class Recorder(Protocol):
    """Records passes of decodes, so that a step is one call.

    `takes_padding`: the kernels write nothing for units and slots of -1, so that a recording is for
    any number of rows up to its own, and `record` may run a pass of padding as often as it likes.
    Else it runs the pass once. `why_not`: the reason when the last pass could not be recorded.
    """

    takes_padding: bool
    why_not: str

    def record(self, run: Callable[[], Tensor]) -> tuple[Replay | None, Tensor]:
        """The recording of a pass, and its result, which each replay writes anew."""


@dataclass(slots=True, frozen=True, kw_only=True)
class Ops:
    """One column of the table.

    A `pool` [units, ...] holds one kind of state of a layer, by unit; the batch's states in it move
    on in place. `name`: the column's, in the log and in a model's identity. `recorder`: of passes
    that run on its kernels alone, or None.
    """

    name: str
    recorder: Recorder | None
    linear: MakeProduct
    norm: MakeNorm
    gated_norm: MakeGatedNorm
    activation: MakeActivation
    gate: Gate
    rotate_: Rotate
    lookup: Lookup
    paged_attention: PagedAttention
    causal_conv1d: CausalConv1d
    gated_delta_rule: GatedDeltaRule
    selective_scan: SelectiveScan
    ssd: StateSpaceDuality
    router: MakeRouter
    experts: MakeMixture


def torch_ops(quantization: Quantization | None = None) -> Ops:
    """Torch's own operators: right on any device. All layers share temporaries."""
    scratch = Scratch()
    return Ops(
        name="torch",
        recorder=None,
        linear=TorchLinear if quantization is None else TorchInt8Linear,
        norm=TorchNorm,
        gated_norm=TorchGatedNorm,
        activation=make_activation,
        gate=gate,
        rotate_=rotate_,
        lookup=lookup,
        paged_attention=partial(paged_attention, scratch=scratch),
        causal_conv1d=causal_conv1d,
        gated_delta_rule=partial(gated_delta_rule, scratch=scratch),
        selective_scan=selective_scan,
        ssd=ssd,
        router=TorchRouter,
        experts=TorchExperts,
    )


def native_ops(kernels: Kernels, quantization: Quantization | None = None) -> Ops:
    """The operators of the native kernels, for CPUs, and torch's for the rest."""

    def linear(weight: Tensor, bias: Tensor | None = None) -> Product:
        # Of any width: its kernel fills the last group of a row up with zeros.
        if quantization is not None:
            return native_linear.NativeInt8Linear(kernels, weight, bias)
        if not native_linear.is_suited(weight):
            return TorchLinear(weight, bias)
        return native_linear.NativeLinear(kernels, weight, bias)

    def experts(up: Tensor, down: Tensor, *, activation: Activation, gated: bool) -> Mixture:
        if not all(native_linear.is_suited(stacked[0]) for stacked in (up, down)):
            return TorchExperts(up, down, activation=activation, gated=gated)
        return NativeExperts(kernels, up, down, activation=activation, gated=gated)

    # All that is the same in every call is bound or prepared once: a small model's decode step
    # makes a hundred calls.
    return replace(
        torch_ops(),
        name="native",
        recorder=kernels,
        linear=linear,
        paged_attention=NativeAttention(kernels),
        router=partial(NativeRouter, kernels),
        experts=experts,
        norm=partial(NativeNorm, kernels),
        gated_norm=partial(NativeGatedNorm, kernels),
        activation=partial(NativeActivation, kernels),
        gate=NativeGate(kernels),
        rotate_=NativeRotate(kernels),
        lookup=NativeLookup(kernels),
        causal_conv1d=NativeConv(kernels),
        gated_delta_rule=NativeDeltaRule(kernels),
        ssd=NativeSSD(kernels),
    )


def ops_for(
    device: torch.device,
    dtype: torch.dtype,
    *,
    kernels: KernelChoice,
    quantization: Quantization | None = None,
) -> Ops:
    """The operators of a model of `dtype` on `device`; one table for all of its layers.

    `auto` takes kernels where they run: the native ones on some CPUs, Triton's on a CUDA device.
    `quantization` is that of linear layers' matrices.
    """
    if kernels == "auto" and device.type == "cuda":
        missing = [package for package in ("triton", "fla") if find_spec(package) is None]
        if not missing:
            return cuda_ops(quantization)
        log.warning(
            "torch's operators run on the device", missing=missing, fix=how_to_install("cuda")
        )
    found = None
    if kernels == "auto" and device.type == "cpu":
        found = load_kernels(dtype)
    return torch_ops(quantization) if found is None else native_ops(found, quantization)


def cuda_ops(quantization: Quantization | None = None) -> Ops:
    """The operators of a CUDA device: Triton kernels, and torch's for the rest.

    In Triton's interpreter they run on a CPU, in float32 (`TRITON_INTERPRET=1` in the environment).
    """
    # By name: a node on a CPU has no Triton, and imports none.
    ops: Ops = import_module("engine.ops.cuda_column").fill(torch_ops(quantization))
    return ops
