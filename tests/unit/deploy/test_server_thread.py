"""The life of a server in a member's process: how far it is, and that it ends when told."""

import asyncio
import threading
import time

from deploy.actors import ServerThread

WAIT_S = 10.0


class SlowServer:
    """Starts when it is let to."""

    def __init__(self) -> None:
        self.may_start = threading.Event()
        self.is_closed = threading.Event()

    async def start(self) -> None:
        await asyncio.to_thread(self.may_start.wait, WAIT_S)

    async def wait(self) -> None:
        await asyncio.to_thread(self.is_closed.wait, WAIT_S)

    async def drain(self) -> None:
        """Nothing is under way."""

    async def close(self) -> None:
        self.is_closed.set()


def until(thread: ServerThread, phase: str) -> None:
    deadline = time.monotonic() + WAIT_S
    while thread.phase != phase:
        assert time.monotonic() < deadline, thread.phase
        time.sleep(0.01)


def test_a_server_runs_drains_and_ends() -> None:
    server = SlowServer()
    thread = ServerThread(lambda: server)
    until(thread, "starting")
    server.may_start.set()
    until(thread, "running")
    thread.drain().result(WAIT_S)
    until(thread, "ended")
    assert server.is_closed.is_set()


def test_one_that_is_told_to_end_while_it_starts_stays_ended() -> None:
    server = SlowServer()
    thread = ServerThread(lambda: server)
    thread.drain().result(WAIT_S)
    until(thread, "ended")
    server.may_start.set()
    assert server.is_closed.wait(WAIT_S)
    until(thread, "ended")


def test_an_error_of_the_start_is_told() -> None:
    thread = ServerThread(lambda: 1 // 0)  # type: ignore[arg-type,return-value]
    until(thread, "failed")
    assert "ZeroDivisionError" in thread.problem
    assert not thread.is_wrong_option
