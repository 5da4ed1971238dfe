"""Rows of a table, of every backend, against one row after the other."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.ops.backend import Lookup
from engine.ops.lookup import fast, naive
from engine.ops.lookup.native import NativeLookup
from tests.ops.native import native_kernels


def torch_lookup(model: torch.dtype) -> Lookup:
    return fast.lookup


def native_lookup(model: torch.dtype) -> Lookup:
    return NativeLookup(native_kernels(model))


@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("backend", [torch_lookup, native_lookup])
@given(data=st.data(), size=st.integers(1, 70), scale=st.sampled_from([1.0, 12.0, 0.3]))
@settings(max_examples=25, deadline=None)
def test_rows_are_looked_up(
    backend: Callable[[torch.dtype], Lookup],
    model: torch.dtype,
    *,
    data: st.DataObject,
    size: int,
    scale: float,
) -> None:
    """Also of tables with more dimensions, and of wider ones than the model's."""
    draw = torch.Generator().manual_seed(size)
    stored, dtype = data.draw(
        st.sampled_from([(model, model), (model, torch.float32), (torch.float32, torch.float32)])
    )
    shape = data.draw(st.sampled_from([(size,), (2, size)]))
    table = torch.randn(11, *shape, generator=draw).to(stored)
    rows = torch.tensor(data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=9)))
    found = backend(model)(table, rows, dtype, scale=scale)
    assert found.dtype == dtype
    wanted = naive.lookup(table, rows, dtype, scale=scale)
    near = 1e-6 if stored == torch.float32 else 2**-8
    torch.testing.assert_close(found, wanted, rtol=near, atol=0.0)
