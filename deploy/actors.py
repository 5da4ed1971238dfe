"""Actors around the servers of `python -m prefill_node`, `decode_node` and `proxy`.

An actor that died comes back on its former ports. Knows nothing of placement.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from http import HTTPStatus
from types import FrameType
from typing import Any, TypeVar

import aiohttp
import msgspec
import ray
import uvloop
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from deploy.config import MAX_DRAIN_S, OWN_HOST
from engine.config import NodeConfig
from engine.errors import UnavailableError
from engine.process import Server, configure_logging, raise_descriptor_limit
from engine.rpc.address import join_host_port
from engine.tls import client_tls
from proxy.config import ProxyConfig
from proxy.server import ProxyServer

PORTS = "tandem-ports"
IN_USE = "tandem_proxy_available_nodes"
START_S = 120.0
END_S = 15.0
CLOSE_S = MAX_DRAIN_S + END_S
READY_POLL_S = 0.05

T = TypeVar("T")
ConfigT = TypeVar("ConfigT", NodeConfig, ProxyConfig)


class Member(msgspec.Struct, frozen=True):
    """One actor. `node_id` and `node_ip` are Ray's, `rpc_url` is empty for the proxy."""

    name: str
    kind: str = ""
    url: str = "-"
    engine_id: str = "-"
    rpc_url: str = ""
    node_id: str = "-"
    node_ip: str = ""
    pid: int = 0


class ServerActor:
    """One server on an event loop in a thread of its own; the main thread keeps the signals.

    Ray runs methods one after the other, in the main thread. SIGTERM drains the server before the
    process ends, a second one ends it at once; Ray itself kills 5 s after its own SIGTERM, so what
    stops a cluster calls `close` first. After a restart by Ray the server starts by itself, on the
    ports it had.
    """

    def __init__(self, server: Server) -> None:
        configure_logging()
        raise_descriptor_limit()
        self._server = server
        self._closing = False
        # What starts Ray blocks it, see `deploy.process`; threads inherit what the main thread has.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server", daemon=True).start()
        self._rays_handler = signal.signal(signal.SIGTERM, self._on_sigterm)
        if _kept_ports():
            self.start()

    def start(self) -> Member:
        """Raises what the server's `start` raises."""
        self._run(self._server.start(), START_S)
        waiting = asyncio.run_coroutine_threadsafe(self._server.wait(), self._loop)
        waiting.add_done_callback(self._on_end)
        return self.describe()

    def describe(self) -> Member:
        """The member that runs in this actor."""
        raise NotImplementedError

    def close(self) -> tuple[str, int]:
        """Drains the server and gives everything back; the machine and pid to end now."""
        self._closing = True
        self._run(_drain_and_close(self._server), CLOSE_S)
        return ray.util.get_node_ip_address(), os.getpid()

    def _run(self, coroutine: Coroutine[Any, Any, T], seconds: float) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(seconds)

    def _on_end(self, waiting: Future[None]) -> None:
        """A server that ended without being told to takes its process along, for Ray to restart."""
        if not self._closing:
            os.kill(os.getpid(), signal.SIGTERM)

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The second one comes while the first is at work, in the same thread."""
        try:
            if self._closing:
                self._run(self._server.close(), END_S)
            else:
                self.close()
        finally:
            assert callable(self._rays_handler)
            self._rays_handler(number, frame)


class NodeActor(ServerActor):
    """A prefill or a decode node."""

    def __init__(self, kind: str, config: NodeConfig) -> None:
        # Only now: they need torch, and the driver, which imports this module, does not.
        from decode_node.server import decode_server
        from prefill_node.server import prefill_server

        make = prefill_server if kind == "prefill" else decode_server
        self._node = make(_at_home(config))
        super().__init__(self._node)

    def start(self) -> Member:
        member = super().start()
        # Peers and the proxy know these ports, so the actor takes them again after a restart.
        _keep_ports(port=self._node.http.port, grpc_port=self._node.rpc.port)
        return member

    def describe(self) -> Member:
        node = self._node
        scheme = "grpc" if node.config.ssl_certfile is None else "grpcs"
        return Member(
            name=_name(),
            kind=node.kind,
            url=node.url,
            engine_id=node.engine_id,
            rpc_url=f"{scheme}://{join_host_port(node.host, node.rpc.port)}",
            **_whereabouts(),
        )


class ProxyActor(ServerActor):
    """The proxy."""

    def __init__(self, config: ProxyConfig) -> None:
        self._config = _at_home(config)
        self._proxy = ProxyServer(self._config)
        super().__init__(self._proxy)

    def start(self) -> Member:
        member = super().start()
        _keep_ports(port=self._proxy.port)
        return member

    def describe(self) -> Member:
        return Member(name=_name(), kind="proxy", url=self._proxy.url, **_whereabouts())

    def wait_ready(self, seconds: float) -> None:
        """Returns when all nodes are in use. Raises UnavailableError after `seconds`."""
        url = self.describe().url
        self._run(_wait_ready(url, self._config, seconds), seconds + 1.0)


# No methods: Ray would run all methods of a class with an async one off the main thread.
async def _drain_and_close(server: Server) -> None:
    await server.drain()
    await server.close()


async def _wait_ready(url: str, config: ProxyConfig, seconds: float) -> None:
    missing = {"an answer"}
    try:
        tls = client_tls(config.ssl_ca_certs) if url.startswith("https:") else None
        connector = aiohttp.TCPConnector(ssl=True if tls is None else tls.context)
        async with (
            asyncio.timeout(seconds),
            aiohttp.ClientSession(url, connector=connector) as http,
        ):
            while missing:
                missing = await _missing(http, config)
                await asyncio.sleep(READY_POLL_S)
    except TimeoutError as error:
        raise UnavailableError(f"the proxy is not ready, it misses {missing}") from error


async def _missing(http: aiohttp.ClientSession, config: ProxyConfig) -> set[str]:
    async with http.get("/metrics") as reply:
        found = set((await reply.text()).splitlines())
    async with http.get("/ready") as reply:
        if reply.status != HTTPStatus.OK:
            return {await reply.text()}
    counts = {"prefill": len(config.prefill), "decode": len(config.decode)}
    lines = [f'{IN_USE}{{kind="{kind}"}} {float(count)}' for kind, count in counts.items()]
    return set(lines) - found


def _at_home(config: ConfigT) -> ConfigT:
    """`config` with the ports of this actor's earlier life, and `host: auto` resolved."""
    host = ray.util.get_node_ip_address() if config.host == OWN_HOST else config.host
    return msgspec.structs.replace(config, host=host, **_kept_ports())


def _kept_ports() -> dict[str, int]:
    """Empty in an actor's first life."""
    kept = _internal_kv_get(_name(), namespace=PORTS)
    return msgspec.json.decode(kept, type=dict[str, int]) if kept else {}


def _keep_ports(**ports: int) -> None:
    """The proxy knows a node by its address, so the next life must have the same."""
    _internal_kv_put(_name(), msgspec.json.encode(ports), namespace=PORTS)


def _name() -> str:
    return str(ray.get_runtime_context().get_actor_name())


def _whereabouts() -> dict[str, Any]:
    return {
        "node_id": ray.get_runtime_context().get_node_id(),
        "node_ip": ray.util.get_node_ip_address(),
        "pid": os.getpid(),
    }
