"""Activations and gates of every backend against those that are written out."""

from collections.abc import Callable
from math import pi

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model_configs.feed_forward import Activation
from engine.ops.activation.fast import make_activation
from engine.ops.activation.naive import activation
from engine.ops.activation.native import NativeActivation
from engine.ops.backend import Gate, MakeActivation
from engine.ops.gate import fast, naive
from engine.ops.gate.native import NativeGate
from tests.ops.native import native_kernels

# Torch rounds a bfloat16 function before it multiplies, and the product before it adds.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-6}


def torch_activation(model: torch.dtype) -> MakeActivation:
    return make_activation


def native_activation(model: torch.dtype) -> MakeActivation:
    def make(kind: Activation, *, gated: bool) -> Callable[[Tensor], Tensor]:
        return NativeActivation(native_kernels(model), kind, gated=gated)

    return make


def torch_gate(model: torch.dtype) -> Gate:
    return fast.gate


def native_gate(model: torch.dtype) -> Gate:
    return NativeGate(native_kernels(model))


@pytest.mark.parametrize("model", TOLERANCE)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", Activation)
@pytest.mark.parametrize("backend", [torch_activation, native_activation])
@given(rows=st.integers(0, 9), size=st.integers(1, 70), gap=st.integers(0, 5))
@settings(max_examples=15, deadline=None)
def test_an_activation_is_what_is_written_out(
    backend: Callable[[torch.dtype], MakeActivation],
    kind: Activation,
    model: torch.dtype,
    *,
    gated: bool,
    rows: int,
    size: int,
    gap: int,
) -> None:
    draw = torch.Generator().manual_seed(rows * size)
    width = 2 * size if gated else size
    x = (3.0 * torch.randn(rows, width + gap, generator=draw)).to(model)[:, :width]
    found = backend(model)(kind, gated=gated)(x)
    assert found.dtype == model
    bound = TOLERANCE[model]
    torch.testing.assert_close(found, activation(x, kind, gated=gated), rtol=bound, atol=bound)


@pytest.mark.parametrize("model", TOLERANCE)
@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("backend", [torch_gate, native_gate])
@given(data=st.data(), rows=st.integers(0, 9), size=st.integers(1, 70), gap=st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_a_gate_is_what_is_written_out(
    backend: Callable[[torch.dtype], Gate],
    model: torch.dtype,
    *,
    sigmoid: bool,
    data: st.DataObject,
    rows: int,
    size: int,
    gap: int,
) -> None:
    """By channel and by row, of rows that lie apart; with residual and without."""
    draw = torch.Generator().manual_seed(rows * size)
    width = data.draw(st.sampled_from([1, size]))
    both = torch.randn(rows, size + width + gap, generator=draw).to(model)
    x, by, _ = both.split_with_sizes([size, width, gap], dim=1)
    residual = torch.randn(rows, size, generator=draw).to(model)
    added = residual if data.draw(st.booleans()) else None
    found = backend(model)(x, by, added, sigmoid=sigmoid)
    assert found.dtype == model
    wanted = naive.gate(x, by, added, sigmoid=sigmoid)
    bound = TOLERANCE[model]
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


def gelu(x: Tensor) -> Tensor:
    """With 1 + tanh(z) as 2 sigmoid(2 z): torch's own is all cancellation at x = -10."""
    z = (2.0 / pi) ** 0.5 * (x + 0.044715 * x**3)
    y: Tensor = x * (2.0 * z).sigmoid()
    return y


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


@pytest.mark.parametrize("model", TOLERANCE)
@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (Activation.SILU, F.silu),
        (Activation.GELU_TANH, gelu),
        (Activation.RELU2, squared_relu),
        (None, torch.sigmoid),
    ],
)
def test_functions_over_their_whole_range(
    kind: Activation | None, function: Callable[[Tensor], Tensor], model: torch.dtype
) -> None:
    """Every bfloat16: both infinities, denormals, and NaN, which stays NaN."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.bfloat16)
    x = every.to(model).view(256, 256)
    kernels = native_kernels(model)
    if kind is None:
        found = NativeGate(kernels)(torch.ones_like(x), x)
    else:
        found = NativeActivation(kernels, kind, gated=False)(x)
    wanted = function(x.double()).to(model)
    # Far down a rounded argument of the exponential makes a larger relative error.
    near = 2e-5 if model == torch.float32 else 2**-7
    torch.testing.assert_close(found, wanted, rtol=near, atol=1e-35, equal_nan=True)
