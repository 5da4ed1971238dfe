"""Benchmarks of several processes still run: each in its quick form, to the end, with its files."""

import subprocess
import sys
from pathlib import Path

import pytest

QUICK_S = 300

pytestmark = [pytest.mark.long, pytest.mark.timeout(QUICK_S + 30)]


@pytest.mark.parametrize("name", ["offload", "onoff", "routing"])
def test_the_quick_form_ends_with_its_files(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, timeout=QUICK_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}.json").is_file()
    assert list(tmp_path.glob("*.png"))
