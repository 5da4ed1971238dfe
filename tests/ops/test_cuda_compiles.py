"""Triton's compiler takes the kernels that its interpreter takes; it needs no device for that."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ops.compile_kernels import CASES


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
def test_kernels_compile_for_an_h200(case: str, tmp_path: Path) -> None:
    """In a process of its own: this one has the interpreter."""
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    subprocess.run(
        [sys.executable, "-m", "tests.ops.compile_kernels", case],
        env=environment,
        timeout=110,
        check=True,
    )
