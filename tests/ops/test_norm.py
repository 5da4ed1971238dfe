"""Norms of every backend, alone and with a gate, against those that are written out."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.model_configs.recurrent import Gating
from engine.ops.gated_norm.fast import TorchGatedNorm
from engine.ops.gated_norm.naive import gated_norm
from engine.ops.gated_norm.native import NativeGatedNorm
from engine.ops.norm.fast import TorchNorm
from engine.ops.norm.naive import norm
from engine.ops.norm.native import NativeNorm
from tests.ops.native import native_kernels

# Torch rounds a bfloat16 norm before it adds the residual: twice half a unit in the last place.
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-7}
EPS = 1e-3
SIZES = st.integers(1, 40) | st.integers(60, 200)


def random(draw: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(shape, generator=draw)


def apart(x: Tensor, gap: int) -> Tensor:
    """The same numbers, the rows `gap` numbers further from each other."""
    rows = x.flatten(1)
    return torch.cat([rows, rows[:, :1].expand(-1, gap)], 1)[:, : rows.shape[1]].view(x.shape)


def native_norm(weight: Tensor, eps: float, dtype: torch.dtype, model: torch.dtype) -> NativeNorm:
    return NativeNorm(native_kernels(model), weight, eps, dtype)


def torch_norm(weight: Tensor, eps: float, dtype: torch.dtype, model: torch.dtype) -> TorchNorm:
    return TorchNorm(weight, eps, dtype)


def native_gated(weight: Tensor | None, gating: Gating, model: torch.dtype) -> NativeGatedNorm:
    return NativeGatedNorm(native_kernels(model), weight, EPS, gating=gating)


def torch_gated(weight: Tensor | None, gating: Gating, model: torch.dtype) -> TorchGatedNorm:
    return TorchGatedNorm(weight, EPS, gating=gating)


@pytest.mark.parametrize("model", TOLERANCE)
@pytest.mark.parametrize("make", [torch_norm, native_norm])
@given(data=st.data(), size=SIZES, rows=st.integers(1, 9), groups=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_a_norm_is_what_is_written_out(
    make: Callable[..., TorchNorm | NativeNorm],
    model: torch.dtype,
    *,
    data: st.DataObject,
    size: int,
    rows: int,
    groups: int,
) -> None:
    """By group and without, of either dtype to either; rows that lie apart; tiny rows."""
    draw = torch.Generator().manual_seed(rows * size)
    dtypes = st.sampled_from([model, torch.float32])
    x_dtype, dtype = data.draw(dtypes), data.draw(dtypes)
    shape = data.draw(st.sampled_from([(rows, size), (rows, groups, size)]))
    by_group = len(shape) == 3 and data.draw(st.booleans())
    scale = data.draw(st.sampled_from([1.0, 1e-3, 0.0]))
    x = apart((scale * random(draw, *shape)).to(x_dtype), data.draw(st.integers(0, 5)))
    weight = random(draw, *shape[1:]) if by_group else random(draw, size)
    residual = random(draw, *shape).to(dtype) if data.draw(st.booleans()) else None
    found = make(weight, EPS, dtype, model)(x, residual)
    assert found.dtype == dtype
    wanted = norm(x, weight, EPS, dtype, residual)
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("model", TOLERANCE)
@pytest.mark.parametrize("gating", Gating)
@pytest.mark.parametrize("make", [torch_gated, native_gated])
@given(data=st.data(), size=SIZES, rows=st.integers(1, 9), groups=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_a_norm_with_a_gate_is_what_is_written_out(
    make: Callable[..., TorchGatedNorm | NativeGatedNorm],
    gating: Gating,
    model: torch.dtype,
    *,
    data: st.DataObject,
    size: int,
    rows: int,
    groups: int,
) -> None:
    draw = torch.Generator().manual_seed(rows * size)
    y = random(draw, rows, groups, size)
    gate = (3.0 * random(draw, rows, groups * size)).to(model)
    gate = apart(gate, data.draw(st.integers(0, 5)))
    weight: Tensor | None = None
    if gating is not Gating.GATE_ONLY:
        by_group = data.draw(st.booleans())
        weight = random(draw, groups, size) if by_group else random(draw, size)
    wanted = gated_norm(y.clone(), gate, weight, EPS, gating=gating)
    found = make(weight, gating, model)(y, gate)
    assert found.dtype == model
    bound = TOLERANCE[model]
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound)
