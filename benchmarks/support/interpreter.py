"""Lets the kernels of the CUDA column run in Triton's interpreter, where there is no device.

Triton looks for TRITON_INTERPRET=1 in the environment when it is imported.
"""

from collections.abc import Callable, Iterator
from typing import Any

import triton.language as tl
from fla.ops.common import chunk_delta_h
from triton.runtime.autotuner import Autotuner


def patch(put: Callable[[Any, str, Any], None] = setattr) -> None:
    """All configurations are equally fast, and a loop's variable is a scalar of the language.

    `put`: sets an attribute that may not exist, as tests do for a while only.
    """
    put(Autotuner, "_bench", lambda *_, **__: [1.0, 1.0, 1.0])
    put(chunk_delta_h, "range", scalars)


def scalars(*bounds: Any) -> Iterator[Any]:
    """`range`, of tensors of the language: the interpreter's own is of Python's numbers."""
    return (tl.full((), number, tl.int32) for number in range(*map(int, bounds)))
