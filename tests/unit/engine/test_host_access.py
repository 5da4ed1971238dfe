"""Reads of a device's numbers are found, and what reads none passes."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from tests.support.host_access import HostAccess, no_host_access

READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0]),
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "index of a list": lambda x: [1, 2, 3][x[0]],
    "index of no dimension": lambda x: x[x[0]],
    "bound of a slice": lambda x: x[: x[0]],
    "contains": lambda x: 3 in x,
    "nonzero": lambda x: x.nonzero(),
    "where": lambda x: torch.where(x > 0),
    "mask": lambda x: x[x > 0],
    "mask written": lambda x: x.__setitem__(x > 0, torch.ones(())),
    "masked_select": lambda x: torch.masked_select(x, x > 0),
    "unique": lambda x: torch.unique(x),
    "bincount": lambda x: x.bincount(),
    "equal": lambda x: torch.equal(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_reads_are_found(read: Callable[[Tensor], object]) -> None:
    x = torch.tensor([1, 1, 0])
    with torch.inference_mode(), pytest.raises(HostAccess), no_host_access():
        read(x)


@triton.jit  # type: ignore[untyped-decorator]
def _double(x, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, SIZE)
    tl.store(x + places, 2 * tl.load(x + places))


def test_the_rest_passes() -> None:
    x = torch.tensor([3, 1, 0, 2])
    with torch.inference_mode(), no_host_access():
        _double[(1,)](x, SIZE=4)
        y = x[x // 2] + x[1:3].sum() + x.argsort()[0]
        y.masked_fill_(y > 9, 0).index_copy_(0, x[1:2], x[:1])
        y = torch.where(y > 1, y, 1).repeat_interleave(x, output_size=12)
        assert y.shape == (12,)
    assert x.tolist() == [6, 2, 0, 4]
    with pytest.raises(HostAccess), no_host_access():
        _double[(1,)](x, SIZE=4)
        x.tolist()
