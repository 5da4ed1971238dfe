"""Actors around the servers of `python -m prefill_node`, `decode_node` and `proxy`.

An actor that died comes back on its former ports. Knows nothing of placement.
"""

import asyncio
import os
import signal
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from types import FrameType
from typing import Any, TypeVar

import msgspec
import ray
import uvloop
from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_put

from deploy.config import MAX_DRAIN_S, OWN_HOST
from engine.errors import UnavailableError
from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from serving.config import LogLevel, NodeConfig
from serving.process import Server, configure_logging, raise_descriptor_limit, wait_until
from serving.rpc.address import join_host_port

PORTS = "tandem-ports"
START_S = 120.0
END_S = 15.0
CLOSE_S = MAX_DRAIN_S + END_S

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

    Ray runs methods one after the other, in the main thread, as long as none of them is async.
    SIGTERM drains the server before the process ends, a second one ends it at once; Ray itself
    kills 5 s after its own SIGTERM, so what stops a cluster calls `close` first. After a restart by
    Ray the server starts by itself, on the ports it had.
    """

    def __init__(self, server: Server, log_level: LogLevel) -> None:
        configure_logging(log_level)
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
        self._run(self._server.drain(), CLOSE_S)
        self._run(self._server.close(), END_S)
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
        from connector.registry import builder_of
        from serving.node.server import NodeServer

        self._node = NodeServer(_at_home(config), kind, builder_of)
        super().__init__(self._node, config.log_level)

    def start(self) -> Member:
        member = super().start()
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
        self._proxy = ProxyServer(_at_home(config))
        super().__init__(self._proxy, config.log_level)

    def start(self) -> Member:
        member = super().start()
        _keep_ports(port=self._proxy.port)
        return member

    def describe(self) -> Member:
        return Member(name=_name(), kind="proxy", url=self._proxy.url, **_whereabouts())

    def wait_ready(self, seconds: float) -> None:
        """Returns when all nodes are in use. Raises UnavailableError after `seconds`."""
        ready = wait_until(lambda: not self._proxy.missing(), seconds)
        if not self._run(ready, seconds + 1.0):
            missing = "; ".join(self._proxy.missing())
            raise UnavailableError(f"the proxy is not ready, it misses {missing}")


def _at_home(config: ConfigT) -> ConfigT:
    """`config` with the ports of this actor's earlier life, and `host: auto` resolved."""
    host = ray.util.get_node_ip_address() if config.host == OWN_HOST else config.host
    return msgspec.structs.replace(config, host=host, **_kept_ports())


def _kept_ports() -> dict[str, int]:
    """Empty in an actor's first life."""
    kept = _internal_kv_get(_name(), namespace=PORTS)
    return msgspec.json.decode(kept, type=dict[str, int]) if kept else {}


def _keep_ports(**ports: int) -> None:
    """Peers and the proxy know these ports, so the next life must have the same."""
    _internal_kv_put(_name(), msgspec.json.encode(ports), namespace=PORTS)


def _name() -> str:
    return str(ray.get_runtime_context().get_actor_name())


def _whereabouts() -> dict[str, Any]:
    return {
        "node_id": ray.get_runtime_context().get_node_id(),
        "node_ip": ray.util.get_node_ip_address(),
        "pid": os.getpid(),
    }
