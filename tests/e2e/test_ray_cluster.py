"""Prefill, decode and proxy on three raylets of one machine, token authentication on."""

import os
import subprocess
import sys
from pathlib import Path

import msgspec

DRIVER = Path(__file__).parents[1] / "ray_driver.py"


def test_three_raylets_serve_and_leave_nothing(
    checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """A process of its own: Ray reads its environment on import, once per process."""
    token = tmp_path / "token"
    token.write_text("ab" * 32)
    ours = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    shm_before = set(os.listdir("/dev/shm"))
    done = subprocess.run(
        [sys.executable, str(DRIVER), str(checkpoints["qwen3_5"])],
        env={**os.environ, **ours, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": os.getcwd()},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()[-4000:]
    report = msgspec.json.decode(done.stdout.splitlines()[-1])
    assert sorted(report["kinds"]) == ["decode", "prefill", "proxy"]
    assert len(set(report["node_ids"])) == 3
    assert report["completion_tokens"] == 8
    assert report["actors_after"] == []
    assert not [pid for pid in report["pids"] if Path(f"/proc/{pid}").exists()]
    assert not {n for n in set(os.listdir("/dev/shm")) - shm_before if "tandem" in n}
