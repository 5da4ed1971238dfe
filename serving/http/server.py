"""uvicorn in a running event loop: own socket, no signal handlers, graceful end. Knows no app.

The server accepts connections one by one: asyncio would take a whole backlog at once, and log a
traceback for each connection that no descriptor is left for.
"""

import asyncio
import resource
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Final

import structlog
import uvicorn
from starlette.types import ASGIApp

from engine.errors import ConfigError
from serving.http.connection import Connection, ConnectionLimits, Connections
from serving.tls import ServerTls

CANCEL_GRACE_S: Final = 5.0
ACCEPT_RETRY_S: Final = 0.1
WARNING_INTERVAL_S: Final = 60.0
MAX_CONNECTIONS: Final = 8192
OTHER_DESCRIPTORS: Final = 64

log = structlog.get_logger()


class _Server(uvicorn.Server):
    """uvicorn's server without signal handlers: it may run in an actor or a test."""

    def __init__(
        self, config: uvicorn.Config, listening: socket.socket, limits: ConnectionLimits
    ) -> None:
        super().__init__(config)
        self.accepting = asyncio.Event()
        self._listening = listening
        self._limits = limits
        # A part of the descriptors is left for everything else in the process.
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        room = max(1, min(MAX_CONNECTIONS, soft - max(OTHER_DESCRIPTORS, soft // 4)))
        self._connections = Connections(limits.max_connections or room, self.server_state)
        self._accept_task: asyncio.Task[None] | None = None
        self._next_warning = 0.0

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])
        self._accept_task = asyncio.create_task(self._accept())
        self.accepting.set()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # No new connections first; then uvicorn ends those that are open.
        tasks = [task for task in (self._accept_task, *self._connections.opening) if task]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listening.close()
        await super().shutdown()

    async def on_tick(self, counter: int) -> bool:
        self._connections.bound_unread(self._limits.max_unread_bytes_in_all)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(self._listening)
            except OSError:  # no descriptor is left, or the client has gone
                self._connections.make_room()
                await asyncio.sleep(ACCEPT_RETRY_S)
                continue
            if self._connections.make_room():
                task = asyncio.create_task(self._open(accepted))
                self._connections.opening.add(task)
                # A TLS handshake makes the server wait as well, so it may be dropped too.
                self._connections.waits(task, task.cancel)
                task.add_done_callback(self._on_opened)
            else:
                accepted.close()
            self._warn()
            await asyncio.sleep(0)  # other tasks go on, however many clients connect

    async def _open(self, accepted: socket.socket) -> None:
        """Hand a connection to its protocol; with TLS, after the handshake."""
        tls = self.config.ssl
        timeout_s = None if tls is None else self._limits.header_timeout_s
        make_connection = partial(
            Connection, self._connections, self._limits, self.config, state=self.server_state
        )
        with suppress(OSError):  # the client has left, or failed the handshake
            await asyncio.get_running_loop().connect_accepted_socket(
                make_connection, accepted, ssl=tls, ssl_handshake_timeout=timeout_s
            )

    def _on_opened(self, task: asyncio.Task[None]) -> None:
        self._connections.opening.discard(task)
        self._connections.settled(task)

    def _warn(self) -> None:
        """Log how many connections were dropped, at most once a minute."""
        now = time.monotonic()
        if self._connections.num_dropped and now >= self._next_warning:
            log.warning(
                "connections dropped, the longest idle first",
                dropped=self._connections.num_dropped,
                limit=self._connections.limit,
            )
            self._connections.num_dropped = 0
            self._next_warning = now + WARNING_INTERVAL_S


class HttpServer:
    """An HTTP server that binds its socket when constructed; raises ConfigError if it cannot."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        *,
        drain_timeout_s: float,
        tls: ServerTls | None = None,
        limits: ConnectionLimits | None = None,
    ) -> None:
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._drain_timeout_s = drain_timeout_s
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            ssl_certfile=None if tls is None else tls.certfile,
            ssl_keyfile=None if tls is None else tls.keyfile,
            ws="none",
            timeout_graceful_shutdown=max(1, round(drain_timeout_s)),
        )
        self._server = _Server(config, self._socket, limits or ConnectionLimits())
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Returns when requests are accepted."""
        self._serving = asyncio.create_task(self._server.serve())
        await self._server.accepting.wait()

    async def close(self) -> None:
        """Stop accepting, let running requests end, cancel those that outlast the drain timeout."""
        self._server.should_exit = True
        if self._serving is not None:
            await asyncio.wait({self._serving}, timeout=self._drain_timeout_s + CANCEL_GRACE_S)
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._socket.close()


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket; raises ConfigError when the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server(
            (host, port), family=family, backlog=2048, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise ConfigError(f"cannot listen for HTTP on {host}:{port}: {error.strerror}") from error
    listening.setblocking(False)
    # Nagle's delay costs a stream's first token 40 ms. Connections inherit this option; asyncio
    # would set it, but does not recognise sockets whose protocol is left at 0.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listening
