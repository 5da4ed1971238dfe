"""Signals while a server starts: the first ends it without a drain, the second at once."""

import signal
import subprocess
import sys

import pytest

IN_TIME_S = 60.0
LOADS = """
import asyncio, sys
from serving.process import run_server

class Server:
    async def start(self):
        print("loads", flush=True)
        await asyncio.to_thread(sys.stdin.read)
    async def wait(self):
        raise AssertionError("it has not started")
    drain = wait
    async def close(self):
        print("closed", flush=True)

run_server(Server)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("hurries", [False, True])
def test_a_server_that_loads_ends_when_it_can_and_with_a_second_signal_at_once(
    number: signal.Signals, hurries: bool
) -> None:
    command = [sys.executable, "-c", LOADS]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        try:
            assert process.stdout.readline() == "loads\n"
            process.send_signal(number)
            assert process.stdout.readline() == "closed\n"
            if hurries:
                process.send_signal(number)
            else:
                process.stdin.close()
            assert process.wait(IN_TIME_S) == (-number if hurries else 0)
        finally:
            process.kill()
