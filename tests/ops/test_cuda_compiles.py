"""Triton's compiler takes the kernels that its interpreter takes; it needs no device for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.compile_kernels import CASES

# In float32 they are compiled by hand: that is for comparisons with the truth.
BFLOAT16 = [case for case in CASES if case.endswith("bfloat16")]


@pytest.mark.long
@pytest.mark.parametrize("half", [0, 1])
def test_kernels_compile_for_an_h200(half: int, tmp_path: Path) -> None:
    """In a process of its own: this one has the interpreter."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", *BFLOAT16[half::2]],
        env=environment,
        timeout=170,
        check=True,
    )
