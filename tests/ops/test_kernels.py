"""A library whose kernels are of other sources is refused: it would read wrong addresses."""

import pytest

from engine.native.kernels import Kernel
from tests.ops.native import native_kernels


@pytest.mark.parametrize(("name", "fields"), [("linear_float32", "8q"), ("of_tomorrow", "9q")])
def test_a_kernel_of_other_sources_is_refused(name: str, fields: str) -> None:
    with pytest.raises(RuntimeError, match=f"kernel '{name}' .*: install it again"):
        Kernel(native_kernels(), name, fields)
