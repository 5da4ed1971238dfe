"""The scripts of `examples/` as a stranger runs them: each prints what its docstring promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_tree import ROOT, listed

PROMISES = {
    "own_connector": ("stored: CachedBlocks", "stored: CachedStates", "generated: ("),
    "own_routing_policy": ("'reason': 'short'", "'reason': 'long'"),
    "pd_pair": ("P keeps: KVTransferParams(", "verified=True", "cause=''", "D generated:"),
    "use_engine": ("One morning, Mia",),
}


def test_every_example_is_run() -> None:
    assert {path.stem for path in listed(ROOT / "examples")} == {*PROMISES}


@pytest.mark.parametrize("name", PROMISES)
def test_an_example_does_what_it_says(name: str, model: Path) -> None:
    script = f"examples/{name}.py"
    assert f"`python {script} MODEL`" in (ROOT / script).read_text()
    done = subprocess.run(
        [sys.executable, script, str(model)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0 and not done.stderr, done.stdout + done.stderr
    assert [it for it in PROMISES[name] if it not in done.stdout] == [], done.stdout
