"""Benchmarks of several processes still run: each in its quick form, to the end, with its files.

And when they are told to stop they leave nothing: no server, no half of a file.
"""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

QUICK_S = 300
STOP_S = 60

pytestmark = [pytest.mark.long, pytest.mark.timeout(QUICK_S + 30)]


@pytest.mark.parametrize("name", ["offload", "onoff", "routing", "serving"])
def test_the_quick_form_ends_with_its_files(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, timeout=QUICK_S, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}.json").is_file()
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after_s", [1, 8, 14, 20])
def test_a_stop_leaves_nothing(number: signal.Signals, after_s: int, tmp_path: Path) -> None:
    """While it imports, while its servers start, while they are asked."""
    command = [sys.executable, "-m", "benchmarks.serving", "--quick", "--out", str(tmp_path)]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL) as process:
        with suppress(subprocess.TimeoutExpired):
            process.wait(after_s)
        process.send_signal(number)
        process.wait(STOP_S)
    assert process.returncode != 0, "it had ended before: stop it earlier"
    assert [path.name for path in tmp_path.iterdir()] == []
    left = subprocess.run(["pgrep", "-f", str(tmp_path)], capture_output=True, check=False)
    assert left.stdout == b""
