"""Nodes and proxy as named Ray actors; the only module that imports ray. Reads no environment."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import ray
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from decode_node.server import decode_server
from deploy.config import ClusterConfig, NodeGroup
from engine.config import NodeConfig
from engine.errors import ConfigError, DeadlineExceededError, UnavailableError
from engine.logs import configure_logging
from engine.node.server import NodeServer
from prefill_node.server import prefill_server
from proxy.config import ProxyConfig
from proxy.server import ProxyServer

NAMESPACE = "tandem"
GROUP = "tandem-nodes"
STOP_ORDER = ("proxy", "decode", "prefill")
OBJECT_STORE_BYTES = 80 << 20
START_S = 120.0
CALL_S = 15.0
CLOSE_S = 45.0

Progress = Callable[[str], None]


class Member(msgspec.Struct, frozen=True):
    """One running actor. `rpc_url` is empty for the proxy; `node_id` is Ray's."""

    kind: str
    engine_id: str
    url: str
    rpc_url: str
    node_id: str
    pid: int


class NodeActor:
    """The server of `python -m prefill_node` or `decode_node`, on the actor's own event loop."""

    def __init__(self, kind: str, config: NodeConfig) -> None:
        configure_logging()
        make: Callable[[NodeConfig], NodeServer] = (
            prefill_server if kind == "prefill" else decode_server
        )
        self._server = make(config)

    async def start(self) -> Member:
        await self._server.start()
        return await self.describe()

    async def describe(self) -> Member:
        server = self._server
        return Member(
            kind=server.kind,
            engine_id=server.engine_id,
            url=server.url,
            rpc_url=f"grpc://{server.config.host}:{server.rpc.port}",
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
        )

    async def close(self) -> None:
        await self._server.close()


class ProxyActor:
    """The server of `python -m proxy`, on the actor's own event loop."""

    def __init__(self, config: ProxyConfig) -> None:
        configure_logging()
        self._config = config
        self._server = ProxyServer(config)

    async def start(self) -> Member:
        await self._server.start()
        return await self.describe()

    async def describe(self) -> Member:
        return Member(
            kind="proxy",
            engine_id="-",
            url=f"http://{self._config.host}:{self._server.port}",
            rpc_url="",
            node_id=ray.get_runtime_context().get_node_id(),
            pid=os.getpid(),
        )

    async def close(self) -> None:
        await self._server.close()


@dataclass(slots=True, frozen=True)
class Placed:
    """An actor to be: its name, what makes it, and its bundle."""

    name: str
    bundle: dict[str, float]


@contextmanager
def connected(address: str | None) -> Iterator[str]:
    """A Ray connection, embedded when `address` is None; yields the GCS address."""
    own: dict[str, Any] = {"include_dashboard": False, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(
            address=address or "local",
            namespace=NAMESPACE,
            log_to_driver=False,
            **({} if address else own),
        )
    except ConnectionError as error:
        raise UnavailableError(f"no Ray cluster at {address}: {error}") from error
    try:
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()


def start_cluster(config: ClusterConfig, source: str, progress: Progress) -> list[Member]:
    """Places and starts all members, P and D first. On any failure nothing stays behind."""
    if names := _names():
        raise ConfigError(f"a cluster is up already ({', '.join(names)}): run down first")
    try:
        return _start(config, source, progress)
    except BaseException:
        stop_cluster(progress)
        raise


def cluster_members() -> list[Member]:
    """Who runs, ordered by actor name. Raises DeadlineExceededError when one does not answer."""
    calls = [ray.get_actor(name).describe.remote() for name in _names()]
    return _get(calls, CALL_S, "status")


def stop_cluster(progress: Progress) -> None:
    """Closes proxy, then D, then P; an actor that does not close in time is killed."""
    names = _names()
    for kind in STOP_ORDER:
        chosen = [name for name in names if name.startswith(kind)]
        if chosen:
            progress(f"stopping {', '.join(chosen)}")
        _stop([ray.get_actor(name) for name in chosen])
    _remove_group()


def _start(config: ClusterConfig, source: str, progress: Progress) -> list[Member]:
    plan = [*_group("prefill", config.prefill), *_group("decode", config.decode)]
    place = config.proxy_placement(source)
    plan.append(Placed("proxy", {"CPU": place.num_cpus, **place.resources}))
    progress("placing")
    group = placement_group([p.bundle for p in plan], name=GROUP, lifetime="detached")
    if not group.wait(CALL_S):
        wanted = ", ".join(f"{p.name} {p.bundle}" for p in plan)
        raise UnavailableError(f"the Ray cluster has no room for: {wanted}")
    configs = {
        "prefill": config.node("prefill", config.prefill, source),
        "decode": config.node("decode", config.decode, source),
    }
    progress("loading the model")
    actors = []
    for index, placed in enumerate(plan[:-1]):
        kind = placed.name.partition("-")[0]
        actors.append(_actor(NodeActor, placed, group, index, (kind, configs[kind])))
    nodes = _get([actor.start.remote() for actor in actors], START_S, "nodes to start")
    progress("starting the proxy")
    urls = {kind: tuple(n.rpc_url for n in nodes if n.kind == kind) for kind in configs}
    proxy_config = config.proxy_config(urls["prefill"], urls["decode"], source)
    proxy = _actor(ProxyActor, plan[-1], group, len(plan) - 1, (proxy_config,))
    return [*nodes, *_get([proxy.start.remote()], START_S, "the proxy to start")]


def _group(kind: str, group: NodeGroup) -> list[Placed]:
    bundle = {"CPU": group.num_cpus, **group.resources}
    return [Placed(f"{kind}-{index}", bundle) for index in range(group.replicas)]


def _actor(
    kind: type, placed: Placed, group: PlacementGroup, index: int, arguments: tuple[object, ...]
) -> Any:
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
    bundle = dict(placed.bundle)
    return (
        ray.remote(kind)
        .options(
            name=placed.name,
            lifetime="detached",
            num_cpus=bundle.pop("CPU"),
            resources=bundle,
            scheduling_strategy=strategy,
        )
        .remote(*arguments)
    )


def _get(calls: list[Any], seconds: float, what: str) -> list[Any]:
    try:
        return list(ray.get(calls, timeout=seconds))
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceededError(f"waited {seconds:g} s for {what}") from error
    except ray.exceptions.RayActorError as error:
        raise UnavailableError(f"waiting for {what}: {error}") from error


def _names() -> list[str]:
    names = ray.util.list_named_actors()
    return sorted(name for name in names if name.partition("-")[0] in STOP_ORDER)


def _stop(actors: list[Any]) -> None:
    calls = [actor.close.remote() for actor in actors]
    if calls:
        ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
    for actor in actors:
        ray.kill(actor)
    deadline = time.monotonic() + CALL_S
    gone = {actor._actor_id.hex() for actor in actors}
    while gone and time.monotonic() < deadline and set(_ids()) & gone:
        time.sleep(0.05)


def _ids() -> list[str]:
    return [ray.get_actor(name)._actor_id.hex() for name in _names()]


def _remove_group() -> None:
    try:
        remove_placement_group(ray.util.get_placement_group(GROUP))
    except ValueError:
        return  # Ray's answer for "no such group"
