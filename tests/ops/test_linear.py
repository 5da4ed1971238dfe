"""Matrix products of every backend against the one that is written out."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.ops.backend import Product
from engine.ops.linear.fast import TorchLinear
from engine.ops.linear.naive import linear
from engine.ops.linear.native import NativeLinear
from tests.ops.native import native_kernels

# Sums of float32 in another order; a bfloat16 result is half a unit in its last place off.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def native(weight: Tensor, bias: Tensor | None) -> Product:
    return NativeLinear(native_kernels(weight.dtype), weight, bias)


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("make", [TorchLinear, native])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_product_is_what_is_written_out(
    make: Callable[[Tensor, Tensor | None], Product], dtype: torch.dtype, data: st.DataObject
) -> None:
    """Whatever remains of rows, outputs and inputs; with bias and residual, and without."""
    rows = data.draw(st.integers(1, 40))
    outputs = data.draw(st.integers(1, 80))
    inputs = 2 * data.draw(st.integers(1, 70))
    draw = torch.Generator().manual_seed(rows * outputs * inputs)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    weight, x = random(outputs, inputs), random(rows, inputs)
    bias = random(outputs) if data.draw(st.booleans()) else None
    residual = random(rows, outputs) if data.draw(st.booleans()) else None
    found = make(weight, bias)(x, residual)
    wanted = linear(x, weight, bias, residual)
    assert found.dtype == dtype
    bound = TOLERANCE[dtype]
    torch.testing.assert_close(found, wanted, rtol=bound, atol=bound * inputs**0.5)


def test_many_rows_pass_in_blocks() -> None:
    """More words of x than one block holds, and rows that lie apart."""
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(50, 3000, generator=draw)
    x = torch.randn(100, 3100, generator=draw)[:, :3000]
    found = native(weight, None)(x)
    torch.testing.assert_close(found, linear(x, weight), rtol=1e-5, atol=1e-3)
