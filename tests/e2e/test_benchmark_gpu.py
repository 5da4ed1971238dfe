"""The phases of `benchmarks.gpu` that compare, on the CPU: what is right is found right."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.sheet import read_rows
from tests.source_tree import ROOT


@pytest.mark.long
def test_operators_and_transports_are_right_on_the_cpu(tmp_path: Path) -> None:
    phases = [word for name in ("operators", "transports") for word in ("--phase", name)]
    out, models = tmp_path / "out", tmp_path / "models"
    folders = ["--out", str(out), "--models", str(models)]
    command = [sys.executable, "-m", "benchmarks.gpu", "--device", "cpu", "--quick"]
    done = subprocess.run(
        [*command, *folders, *phases], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    logs = "".join(log.read_text() for log in out.glob("*.log"))
    assert done.returncode == 0, done.stderr + logs
    rows = read_rows(out)
    assert {row.phase for row in rows} == {"operators", "transports"}
    assert {row.verdict for row in rows} == {"right"}, logs
