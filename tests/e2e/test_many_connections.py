"""More idle connections than a process may have descriptors lock nobody out."""

import asyncio
import contextlib
import socket
from pathlib import Path

import aiohttp

from tests.support.nodes.asking import get
from tests.support.nodes.processes import ServerProcess, free_port

DESCRIPTORS = 128
IDLE = 300
LOG_BYTES = 100_000


async def until_alive(url: str) -> None:
    async with asyncio.timeout(60):
        while True:
            with contextlib.suppress(aiohttp.ClientConnectionError):
                async with aiohttp.ClientSession() as session, session.get(f"{url}/health"):
                    return
            await asyncio.sleep(0.05)


async def test_good_requests_get_in_whoever_sits_there(tmp_path: Path) -> None:
    port = free_port()
    limits = ["prlimit", f"--nofile={DESCRIPTORS}:{DESCRIPTORS}"]
    flags = ["--decode", "grpc://127.0.0.1:1", "--port", str(port)]
    server = ServerProcess.launch(tmp_path / "proxy", "proxy", *flags, inside=limits)
    url = f"http://127.0.0.1:{port}"
    idle: list[socket.socket] = []
    try:
        await until_alive(url)
        for _ in range(IDLE):
            idle.append(socket.create_connection(("127.0.0.1", port), timeout=5))
        for _ in range(5):
            async with (
                asyncio.timeout(5),
                aiohttp.ClientSession() as session,
                session.get(f"{url}/health") as reply,
            ):
                assert reply.status == 200
            assert (await get(url, "/v1/models")).error(503)
        server.stop()
        assert len(server.said) < LOG_BYTES
    finally:
        for each in idle:
            each.close()
        if server.process.poll() is None:
            server.kill()
