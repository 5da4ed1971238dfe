"""Matrix products of every backend against the one that is written out."""

from collections.abc import Callable, Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops.backend import Product
from engine.ops.linear.fast import TorchInt8Linear, TorchLinear
from engine.ops.linear.naive import linear, linear_int8
from engine.ops.linear.native import NativeInt8Linear, NativeLinear
from tests.ops.native import native_kernels

# Sums of float32 in another order; a bfloat16 result is half a unit in its last place off.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


Make = Callable[[Tensor, Tensor | None], Product]


def native(weight: Tensor, bias: Tensor | None) -> Product:
    return NativeLinear(native_kernels(weight.dtype), weight, bias)


def native_int8(weight: Tensor, bias: Tensor | None) -> Product:
    return NativeInt8Linear(native_kernels(weight.dtype), weight, bias)


FORMS: Mapping[Make, Callable[..., Tensor]] = {
    TorchLinear: linear,
    native: linear,
    TorchInt8Linear: linear_int8,
    native_int8: linear_int8,
}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", FORMS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_product_is_what_is_written_out(
    make: Make, dtype: torch.dtype, data: st.DataObject
) -> None:
    """Whatever remains of rows, outputs and inputs; with bias and residual, and without."""
    rows = data.draw(st.integers(0, 40))
    outputs = data.draw(st.integers(1, 80))
    inputs = 2 * data.draw(st.integers(1, 100))
    draw = torch.Generator().manual_seed(rows * outputs * inputs)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    weight, x = random(outputs, inputs), random(rows, inputs)
    bias = random(outputs) if data.draw(st.booleans()) else None
    residual = random(rows, outputs) if data.draw(st.booleans()) else None
    found = make(weight, bias)(x, residual)
    wanted = FORMS[make](x, weight, bias, residual)
    assert found.dtype == dtype
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * inputs**0.5)


@pytest.mark.parametrize("make", [native, native_int8])
def test_many_rows_pass_in_blocks(make: Make) -> None:
    """More words of x than one block holds, and rows that lie apart."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 3000, generator=draw)
    x = torch.randn(300, 3100, generator=draw)[:, :3000]
    residual = torch.randn(300, 60, generator=draw)[:, :50]
    found = make(weight, None)(x, residual)
    expected = FORMS[make](x, weight, None, residual)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", [native, native_int8])
def test_a_native_row_is_the_same_in_any_batch(make: Make, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(70, 200, generator=draw).to(dtype)
    x = torch.randn(30, 200, generator=draw).to(dtype)
    product = make(weight, None)
    together = product(x)
    for rows in (1, 2, 3, 4, 7, 11, 12, 13):
        assert torch.equal(product(x[:rows]), together[:rows])


@pytest.mark.parametrize("make", [TorchInt8Linear, native_int8])
def test_int8_of_nothing_is_nothing_and_of_no_number_is_none(make: Make) -> None:
    """Zeros and numbers too small for a scale in groups; what is not finite stays visible."""
    weight = torch.ones(40, 130)
    weight[3] = 0.0
    weight[4, 64:] = 1e-39
    x = torch.ones(5, 130)
    x[1], x[2] = 0.0, 1e-38
    x[3, 7], x[4, 129] = torch.nan, torch.inf
    found = make(weight, None)(x)
    torch.testing.assert_close(found[:3], linear_int8(x[:3], weight))
    assert not found[3:].isfinite().any()
