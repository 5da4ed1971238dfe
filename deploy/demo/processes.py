"""Starts and stops the demo's processes: nodes and proxy, as a user would start them by hand."""

import asyncio
import re
import signal
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass

from engine.errors import UnavailableError

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 20.0


@dataclass(slots=True)
class ServerProcess:
    """One `python -m MODULE ...` whose log says where it serves."""

    process: asyncio.subprocess.Process
    url: str
    drain: asyncio.Task[bytes]

    @classmethod
    async def start(cls, *arguments: str) -> "ServerProcess":
        """Returns when the process serves; raises UnavailableError with its last words otherwise."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", *arguments, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        last = b""
        async with asyncio.timeout(START_TIMEOUT_S):
            async for line in process.stderr:
                last = line
                found = re.search(rb'"url": "(http://[^"]+)"', line)
                if found:
                    drain = asyncio.create_task(process.stderr.read())
                    return cls(process, found[1].decode(), drain)
        raise UnavailableError(f"{arguments[0]} did not start: {last.decode(errors='replace')}")

    async def stop(self) -> None:
        """SIGTERM, and SIGKILL when that is not heard."""
        if self.process.returncode is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self.process.wait(), STOP_TIMEOUT_S)
        except TimeoutError:
            self.process.kill()
            await self.process.wait()
        await self.drain


class DemoCluster:
    """One prefill node, one decode node, one proxy; use as an async context manager."""

    def __init__(self, model: str, name: str, port: int) -> None:
        self._node_flags = [model, "--port", "0", "--served-model-name", name]
        self._port = port
        self._resources = AsyncExitStack()

    async def __aenter__(self) -> "DemoCluster":
        self.prefill, self.decode = await asyncio.gather(
            self._start("prefill_node", *self._node_flags),
            self._start("decode_node", *self._node_flags),
        )
        nodes = ["--prefill", self.prefill.url, "--decode", self.decode.url]
        self.proxy = await self._start("proxy", *nodes, "--port", str(self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    async def _start(self, *arguments: str) -> ServerProcess:
        process = await ServerProcess.start(*arguments)
        self._resources.push_async_callback(process.stop)
        return process
