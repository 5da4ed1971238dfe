"""uvicorn in a running event loop: own socket, no signal handlers, graceful end. Knows no app."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from engine.errors import ConfigError
from engine.tls import ServerTls

CANCEL_GRACE_S: Final = 5.0


class _Server(uvicorn.Server):
    """Leaves signals to the process's `__main__`: the server may run in an actor or a test."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.accepting.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """Owns the listening socket from construction on; ConfigError when it cannot be bound."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        drain_timeout_s: float,
        tls: ServerTls | None = None,
    ) -> None:
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._drain_timeout_s = drain_timeout_s
        self._server = _Server(_uvicorn_config(app, drain_timeout_s, tls))
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when requests are accepted."""
        self._serving = asyncio.create_task(self._server.serve(sockets=[self._socket]))
        await self._server.accepting.wait()

    async def close(self) -> None:
        """Accept no more, let running requests end, cancel those that outlast the drain timeout."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=self._drain_timeout_s + CANCEL_GRACE_S)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    """Without Nagle's delay, which costs a stream's first token 40 ms; connections inherit it.

    asyncio would switch it off, but does not recognise sockets whose protocol is left at 0.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise ConfigError(f"cannot listen for HTTP on {host}:{port}: {error.strerror}") from error
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening


def _uvicorn_config(app: ASGIApp, drain_timeout_s: float, tls: ServerTls | None) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        ssl_certfile=None if tls is None else tls.certfile,
        ssl_keyfile=None if tls is None else tls.keyfile,
        timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
    )
