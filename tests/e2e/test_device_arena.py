"""A hand-over between arenas as on a device: an undeclared touch of one ends the process."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiers import everyday

STOP_S = 240.0


@pytest.mark.parametrize("family", everyday(("qwen3_5", "nemotron_h"), ("qwen3_5",)))
def test_only_operators_and_the_arena_itself_touch_its_bytes(
    checkpoints: dict[str, Path], family: str
) -> None:
    """Tokens and log-probabilities are those of one node, and every byte is verified."""
    # Without Triton and fla: a node whose operators run on a CPU needs neither.
    start = (
        "import runpy, sys; sys.modules.update(triton=None, fla=None); "
        "runpy.run_module('tests.support.nodes.device_nodes', run_name='__main__')"
    )
    command = [sys.executable, "-c", start, str(checkpoints[family]), "zmq"]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=STOP_S
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
