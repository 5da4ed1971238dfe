"""Serves an ASGI app in the running event loop: bind first, so that port 0 has an answer, then
serve, then close.

Knows nothing of routes.
"""

import asyncio
import socket

import uvicorn
from starlette.types import ASGIApp

from engine.errors import ConfigError

START_TIMEOUT_S = 10.0
CLOSE_TIMEOUT_S = 5.0
BACKLOG = 2048


class HttpServer:
    """Owner of one listening socket and the task that serves it."""

    def __init__(self, app: ASGIApp, host: str, port: int) -> None:
        self._socket = _bind(host, port)
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            backlog=BACKLOG,
            timeout_graceful_shutdown=int(CLOSE_TIMEOUT_S),
        )
        self._server = uvicorn.Server(config)
        self._task: asyncio.Task[None] | None = None

    @property
    def port(self) -> int:
        """The bound port."""
        port: int = self._socket.getsockname()[1]
        return port

    async def start(self) -> None:
        """Serves until `close`; returns when the first connection would be answered."""
        self._task = asyncio.create_task(self._server._serve([self._socket]))
        async with asyncio.timeout(START_TIMEOUT_S):
            while not self._server.started and not self._task.done():
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Lets running responses end for a moment, then cuts them; the port is free afterwards."""
        self._server.should_exit = True
        if self._task is not None:
            await asyncio.wait_for(self._task, 2 * CLOSE_TIMEOUT_S)
        self._socket.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"cannot listen for HTTP on {host}:{port}: {error.strerror}") from error
    return listener
