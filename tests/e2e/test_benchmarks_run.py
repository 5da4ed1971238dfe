"""Every benchmark still runs in its quick form, and leaves files, or nothing after a Ctrl-C."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.ops.native import native_kernels

QUICK_S = 300
STOP_S = 60.0
POLL_S = 0.1
QUIET_S = 4.0
# Module and words after it; the name of its file.
SCRIPTS = {
    "attacks": ("robustness.attacks",),
    "breakeven": ("hand_over.breakeven",),
    "cluster": ("robustness.cluster",),
    "colocated": ("serving.colocated",),
    "conversation": ("serving.conversation",),
    "decode_overhead": ("engine.decode_overhead",),
    "engine_vs_llama": ("engine.engine_vs_llama",),
    "engine_vs_transformers": ("engine.engine_vs_transformers",),
    "hand_over": ("hand_over",),
    "kv_cache_cost": ("cache", "cost"),
    "kv_events": ("cache.kv_events",),
    "layouts": ("cache", "layouts"),
    "loading": ("engine.loading",),
    "members": ("serving.proxy_cost.members",),
    "offload": ("cache.offload",),
    "pauses": ("serving.pauses",),
    "policies": ("cache", "policies"),
    "prefill_length": ("engine.prefill_length",),
    "proxy_cost": ("serving.proxy_cost",),
    "proxy_cost_vllm": ("serving.proxy_cost", "--backend", "vllm"),
    "replay": ("serving.replay", "G1"),
    "routing": ("cache.routing",),
    "routing_cost": ("cache.routing_cost",),
    "serving": ("serving",),
    "soak": ("robustness.soak",),
    "transfer": ("hand_over.transfer",),
}

pytestmark = [pytest.mark.long, pytest.mark.timeout(QUICK_S + 30)]


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_quick_form_ends_with_its_files(name: str, tmp_path: Path) -> None:
    if name == "prefill_length":
        native_kernels()  # it times them alone, and ends where they do not run
    done = subprocess.run(
        command(name, tmp_path), timeout=QUICK_S, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / f"{name}.json").is_file()
    assert list(tmp_path.glob("*.png"))


@pytest.mark.parametrize("name", ["hand_over", "serving"])
@pytest.mark.parametrize("while_serving", [False, True])
def test_ctrl_c_leaves_no_process(name: str, while_serving: bool, tmp_path: Path) -> None:
    """While its servers start, and while they are asked."""
    log = tmp_path / "log"
    # A suite started in the background ignores SIGINT, and its children would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("wb") as file:
        process = subprocess.Popen(command(name, tmp_path), stdout=file, stderr=file)
    seen: set[psutil.Process] = set()
    try:
        own = psutil.Process(process.pid)
        while len(seen) < 2:
            seen |= children(own)
            assert process.poll() is None, log.read_text()
            time.sleep(POLL_S)
        # It asks its servers once none is being started any more.
        last = time.monotonic()
        while while_serving and time.monotonic() < last + QUIET_S:
            new = children(own) - seen
            seen |= new
            last = time.monotonic() if new else last
            time.sleep(POLL_S)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(STOP_S) != 0
        _, alive = psutil.wait_procs(list(seen), timeout=STOP_S)
        assert not alive, [one.cmdline() for one in alive]
    finally:
        process.kill()
        process.wait()
        for one in psutil.wait_procs(list(seen), timeout=0)[1]:
            one.kill()
    assert not list(tmp_path.glob("*.json"))


def children(process: psutil.Process) -> set[psutil.Process]:
    """All below it, now."""
    try:
        return set(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return set()


def command(name: str, out: Path) -> list[str]:
    module, *words = SCRIPTS[name]
    return [sys.executable, "-m", f"benchmarks.{module}", *words, "--quick", "--out", str(out)]
