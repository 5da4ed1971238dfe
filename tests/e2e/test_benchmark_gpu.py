"""The phases of `benchmarks.gpu` that compare, on the CPU: what is right is found right."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu.sheet import Sheet, read_rows
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
    # By the interpreter, with rows of padding.
    assert any(row.case.startswith("cuda, float32: ssd, padding") for row in rows)


def test_bounds_that_are_met_and_missed(tmp_path: Path) -> None:
    sheet = Sheet("one", tmp_path / "phase-one.json")
    sheet.accept("low", 1.3, "ms", accept=1.35, goal=1.2)
    sheet.accept("lower", 1.1, "ms", accept=1.35, goal=1.2)
    sheet.accept("high", 1.4, "ms", accept=1.35)
    sheet.accept("rate", 3.0, "TB/s", accept=2.8, goal=3.4, at_least=True)
    sheet.accept("low rate", 2.0, "TB/s", accept=2.8, at_least=True)
    sheet.accept("broken", float("nan"), "TB/s", accept=2.8, at_least=True)
    found = [(row.verdict, row.bound, row.goal) for row in read_rows(tmp_path)]
    assert found == [
        ("met", "≤ 1.35", "≤ 1.2"),
        ("met", "≤ 1.35", "≤ 1.2, reached"),
        ("missed", "≤ 1.35", ""),
        ("met", "≥ 2.8", "≥ 3.4"),
        ("missed", "≥ 2.8", ""),
        ("missed", "≥ 2.8", ""),
    ]
