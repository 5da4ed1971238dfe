"""The thread that calls Ray: whatever a call does, its caller goes on. No Ray is started."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from deploy.config import NoClusterError
from deploy.ray_cluster import RayThread
from engine.errors import ConfigError, DeadlineExceededError, UnavailableError

ROOT = Path(__file__).parents[3]
HANGS = """
import os, threading
from deploy.process import stop_on_signals
from deploy.ray_cluster import RayThread

def hang():
    print("hangs", flush=True)
    threading.Event().wait()

stop_on_signals()
try:
    RayThread().call("look", 600.0, hang)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(130)
"""


def raising(error: BaseException) -> Callable[[], None]:
    def function() -> None:
        raise error

    return function


def test_calls_run_in_one_thread_one_after_the_other() -> None:
    thread = RayThread()
    names = [thread.call("look", 60.0, lambda: threading.current_thread()) for _ in range(3)]
    assert len(set(names)) == 1
    assert threading.current_thread() not in names


def test_a_call_that_never_returns_ends_in_time_and_so_does_every_later_one() -> None:
    thread, event = RayThread(), threading.Event()
    with pytest.raises(DeadlineExceededError, match=r"^look: Ray has not answered in 0\.05 s"):
        thread.call("look", 0.05, event.wait)
    assert thread.is_stuck
    for _ in range(2):
        with pytest.raises(DeadlineExceededError, match="Ray has not come back from a call"):
            thread.call("list", 600.0, lambda: 1)
    event.set()


@pytest.mark.parametrize(
    "error", [ConfigError("x"), NoClusterError("x"), KeyError("x"), SystemExit(3)]
)
def test_an_error_of_the_function_arrives_as_it_was(error: BaseException) -> None:
    thread = RayThread()
    with pytest.raises(type(error)) as caught:
        thread.call("look", 60.0, raising(error))
    assert caught.value is error
    assert thread.call("look", 60.0, lambda: 1) == 1


@pytest.mark.parametrize(
    "error",
    [
        ConnectionError("refused"),
        RuntimeError("no init"),
        ray.exceptions.RaySystemError("gone"),
        ray.exceptions.RayTaskError("ask", "Traceback", ValueError("odd")),
    ],
)
def test_errors_of_ray_say_what_was_asked(error: Exception) -> None:
    thread = RayThread()
    with pytest.raises(UnavailableError, match=r"^look: ") as caught:
        thread.call("look", 60.0, raising(error))
    assert caught.value.__cause__ is error
    assert thread.call("look", 60.0, lambda: 1) == 1


def test_an_actor_s_own_error_arrives_as_it_was_there() -> None:
    error = ConfigError("decode.replicas: must be at least 1")
    with pytest.raises(ConfigError) as caught:
        RayThread().call("scale", 60.0, raising(ray.exceptions.RayTaskError("ask", "", error)))
    assert caught.value is error


def test_an_actor_that_is_late_leaves_the_thread_free() -> None:
    thread = RayThread()
    with pytest.raises(DeadlineExceededError, match=r"^status: "):
        thread.call("status", 60.0, raising(ray.exceptions.GetTimeoutError("late")))
    assert thread.call("status", 60.0, lambda: 1) == 1


def test_a_signal_reaches_the_caller_of_a_call_that_hangs() -> None:
    command = [sys.executable, "-c", HANGS]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"hangs\n"
        process.send_signal(signal.SIGTERM)
        told, _ = process.communicate(timeout=60)
    assert (process.returncode, told) == (130, b"interrupted\n")
