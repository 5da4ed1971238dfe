"""Actors around the servers of `python -m prefill_node`, `decode_node` and `proxy`.

Every call returns at once: servers start, drain and end in a thread of their own, and `describe`
tells how far they are. An actor decides nothing; it ends when its process is killed. It keeps a
copy of the cluster's desired state, so that any member can tell it to a controller that was lost.
"""

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final, Literal, TypeVar

import msgspec
import ray
import structlog
import uvloop

from deploy.config import OWN_HOST, Role
from engine.errors import CheckpointError, ConfigError, TandemError
from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from serving.config import LogLevel, NodeConfig
from serving.process import Server, configure_logging, raise_descriptor_limit
from serving.rpc.messages import NodeInfo

BEAT_S: Final = 0.5
LOOK_S: Final = 2.0
"""For a question to the server's event loop."""
END_S: Final = 15.0
LOGS: Final = "tandem-{cluster}-{name}.log"

Phase = Literal["starting", "running", "draining", "ended", "failed"]
ConfigT = TypeVar("ConfigT", NodeConfig, ProxyConfig)
T = TypeVar("T")

log = structlog.get_logger()


class Birth(msgspec.Struct, frozen=True, kw_only=True):
    """The facts with which an actor is made. `digest`: of all that a restart would change.

    `life` counts the processes that had this name. `desired`: the cluster's state, encoded.
    """

    cluster: str
    name: str
    role: Role
    life: int
    digest: str
    desired: bytes


class NodeSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A node as a proxy knows it: see `proxy.cluster.node.Stage`."""

    stage: str
    problem: str
    info: NodeInfo


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's word on itself. `node_id` and `node_ip` are Ray's.

    `problem`: why it failed; `is_wrong_option` then: it would fail again. `url` is that of HTTP,
    `rpc_url` that of gRPC, of a proxy the port where nodes register. `silent_s`: seconds since the
    server's event loop was last at work. `proxies`: of a node, where it registers. `knows_model`:
    of a proxy, which answers no request before. `nodes`: of a proxy, by engine id.
    """

    birth: Birth
    phase: Phase
    problem: str = ""
    is_wrong_option: bool = False
    url: str = "-"
    rpc_url: str = ""
    engine_id: str = "-"
    node_id: str = "-"
    node_ip: str = ""
    pid: int = 0
    gpus: tuple[str, ...] = ()
    log: str = ""
    silent_s: float = 0.0
    proxies: tuple[str, ...] = ()
    knows_model: bool = False
    nodes: dict[str, NodeSeen] = {}


class ServerThread:
    """A server's life, on an event loop in a thread of its own: `phase` tells how far it is.

    `make` makes the server, which may take seconds: it imports what the server needs.
    """

    def __init__(self, make: Callable[[], Server]) -> None:
        self.phase: Phase = "starting"
        self.problem, self.is_wrong_option = "", False
        self._make = make
        self._server: Server | None = None
        self._beat = time.monotonic()
        self._loop = uvloop.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="server", daemon=True).start()
        self._draining: Future[None] | None = None
        # Kept, since a task that nobody refers to may be collected.
        self._tasks = [self._submit(self._serve()), self._submit(self._keep_beating())]

    @property
    def silent_s(self) -> float:
        """Seconds since the event loop was last at work."""
        return time.monotonic() - self._beat

    def call(self, function: Callable[[], T]) -> T:
        """The result of a short call on the event loop. Raises TimeoutError after `LOOK_S`."""

        async def run() -> T:
            return function()

        return self._submit(run()).result(LOOK_S)

    def drain(self) -> Future[None]:
        """Begins to end the server well; it is done when the phase is `ended`."""
        if self._draining is None:
            self._draining = self._submit(self._drain())
        return self._draining

    def close(self) -> None:
        """Ends it at once."""
        if self._server is not None:
            self._submit(self._server.close()).result(END_S)

    def _submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    async def _serve(self) -> None:
        try:
            self._server = await asyncio.to_thread(self._make)
            await self._server.start()
            if self.phase == "ended":  # told so while it started
                await self._server.close()
                return
            self.phase = "running"
            await self._server.wait()
            self._failed("the server ended by itself")
        except TandemError as error:
            self._failed(str(error), isinstance(error, ConfigError | CheckpointError))
        # Broad: whatever it was, the member tells it.
        except Exception as error:
            log.exception("the server failed on an unexpected error")
            self._failed(f"{type(error).__name__}: {error}")

    async def _drain(self) -> None:
        if self._server is not None and self.phase == "running":
            self.phase = "draining"
            await self._server.drain()
            await self._server.close()
        self.phase = "ended"

    async def _keep_beating(self) -> None:
        while True:
            self._beat = time.monotonic()
            await asyncio.sleep(BEAT_S)

    def _failed(self, problem: str, is_wrong_option: bool = False) -> None:
        if self.phase not in ("draining", "ended"):
            self.problem, self.is_wrong_option = problem, is_wrong_option
            self.phase = "failed"


class ServerActor:
    """The part that Ray calls, in the main thread, one call after the other.

    No method may be async: Ray would then run all of them in another thread, and only the main
    thread may handle signals. SIGTERM drains the server before the process ends, a second one ends
    it at once; Ray itself kills 5 s after its own SIGTERM, so what stops a member calls `drain`.
    """

    def __init__(self, birth: Birth, log_level: LogLevel) -> None:
        self._birth = birth
        self._desired = birth.desired
        self._log = _own_log(birth)
        configure_logging(log_level)
        raise_descriptor_limit()
        # What starts Ray blocks it, see `deploy.process`; threads inherit what the main thread has.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
        self._thread = ServerThread(self._make)
        self._known: dict[str, Any] = {}
        self._is_ending = False
        self._rays_handler = signal.signal(signal.SIGTERM, self._on_sigterm)

    def describe(self) -> Told:
        """How the member is now."""
        thread, here = self._thread, ray.get_runtime_context()
        if thread.phase == "running":
            # An event loop that is busy is no reason to fail: `silent_s` tells of it.
            with suppress(TimeoutError):
                self._known = thread.call(self._facts)
        return Told(
            birth=self._birth,
            phase=thread.phase,
            problem=thread.problem,
            is_wrong_option=thread.is_wrong_option,
            node_id=here.get_node_id(),
            node_ip=ray.util.get_node_ip_address(),
            pid=os.getpid(),
            gpus=tuple(map(str, ray.get_gpu_ids())),
            log=self._log,
            silent_s=thread.silent_s,
            **self._known,
        )

    def hold(self, desired: bytes) -> None:
        """Keeps the cluster's desired state, for a controller that has lost it."""
        self._desired = desired

    def held(self) -> bytes:
        return self._desired

    def drain(self) -> None:
        """Begins to end the server well; the phase becomes `ended`."""
        self._thread.drain()

    def _make(self) -> Server:
        raise NotImplementedError

    def _facts(self) -> dict[str, Any]:
        """Fields of `Told` that a server that runs knows. Called on its event loop."""
        raise NotImplementedError

    def _on_sigterm(self, number: int, frame: FrameType | None) -> None:
        """The second one comes while the first is at work, in the same thread."""
        try:
            if self._is_ending:
                self._thread.close()
            else:
                self._is_ending = True
                self._thread.drain().result()
        finally:
            assert callable(self._rays_handler)
            self._rays_handler(number, frame)


class NodeActor(ServerActor):
    """A prefill or a decode node."""

    def __init__(self, birth: Birth, config: NodeConfig) -> None:
        self._config = _at_home(config)
        super().__init__(birth, config.log_level)

    def register_with(self, proxies: Sequence[str]) -> None:
        """These proxies know a running node from now on; one that is busy is told again."""
        if self._thread.phase == "running":
            with suppress(TimeoutError):
                self._thread.call(lambda: self._node.registration.register_with(proxies))

    def _make(self) -> Server:
        # Only now: they need torch, and the driver, which imports this module, does not.
        from connector.registry import builder_of
        from serving.node.server import NodeServer

        self._node = NodeServer(self._config, self._birth.role, builder_of)
        return self._node

    def _facts(self) -> dict[str, Any]:
        node = self._node
        return {
            "url": node.url,
            "rpc_url": node.rpc_url,
            "engine_id": node.engine_id,
            "proxies": node.registration.proxies,
        }


class ProxyActor(ServerActor):
    """A proxy, with which nodes register."""

    def __init__(self, birth: Birth, config: ProxyConfig) -> None:
        self._config = _at_home(config)
        super().__init__(birth, config.log_level)

    def _make(self) -> Server:
        self._proxy = ProxyServer(self._config)
        return self._proxy

    def _facts(self) -> dict[str, Any]:
        proxy = self._proxy
        return {
            "url": proxy.url,
            "rpc_url": proxy.rpc_url,
            "engine_id": proxy.instance,
            "knows_model": proxy.knows_model,
            "nodes": {
                node.info.engine_id: NodeSeen(stage=node.stage, problem=problem, info=node.info)
                for node, problem in proxy.nodes
            },
        }


def _at_home(config: ConfigT) -> ConfigT:
    """`config` with `host: auto` resolved."""
    host = ray.util.get_node_ip_address() if config.host == OWN_HOST else config.host
    return msgspec.structs.replace(config, host=host)


def _own_log(birth: Birth) -> str:
    """From here on the process writes to a file that has the member's name, beside Ray's logs.

    Ray's own are named by numbers of processes. Lives of one name follow each other in one file.
    """
    folder = Path(os.readlink("/proc/self/fd/2")).parent
    file = folder / LOGS.format(cluster=birth.cluster, name=birth.name)
    with file.open("ab", buffering=0) as stream:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
    return str(file)
