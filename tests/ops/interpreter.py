"""Lets fla's kernels run in Triton's interpreter, which tests use instead of a device."""

from collections.abc import Iterator
from typing import Any

import pytest
import triton.language as tl
from fla.ops.common import chunk_delta_h
from triton.runtime.autotuner import Autotuner


def patch(monkeypatch: pytest.MonkeyPatch) -> None:
    """All configurations are equally fast, and a loop's variable is a scalar of the language."""
    monkeypatch.setattr(Autotuner, "_bench", lambda *_, **__: [1.0, 1.0, 1.0])
    monkeypatch.setattr(chunk_delta_h, "range", scalars, raising=False)


def scalars(*bounds: Any) -> Iterator[Any]:
    """`range`, of tensors of the language: the interpreter's own is of Python's numbers."""
    return (tl.full((), number, tl.int32) for number in range(*map(int, bounds)))
