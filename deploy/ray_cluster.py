"""A cluster's members as named, detached Ray actors: placed, started, listed, stopped.

Knows no command line and reads no environment; Ray reads its own when this is imported.
"""

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil
import ray
from ray.experimental.internal_kv import _internal_kv_del
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.actors import CLOSE_S, PORTS, START_S, Member, NodeActor, ProxyActor
from deploy.config import ClusterConfig
from deploy.process import ignore_signals, signals_held, wait_gone
from engine.errors import ConfigError, DeadlineExceededError, TandemError, UnavailableError
from serving.rpc.address import is_loopback

NAMESPACE = "tandem"
GROUP = "tandem-nodes"
STOP_ORDER = ("proxy", "decode", "prefill")
OBJECT_STORE_BYTES = 80 << 20
MAX_RESTARTS = 10
PLACE_S = 30.0
READY_S = 30.0
CALL_S = 15.0
CANNOT_IMPORT = "failed to import on the worker"  # Ray's words

Progress = Callable[[str], None]


def connected(address: str) -> AbstractContextManager[None]:
    """A connection to a running Ray. Raises UnavailableError when none answers or lets us in."""
    return _ray(f"no Ray at {address}, or another token", address=address)


@contextmanager
def embedded(folder: Path, resources: dict[str, float]) -> Iterator[str]:
    """A Ray of our own that ends with the block, its files below `folder`; yields its address."""
    with _ray(
        "Ray did not start",
        address="local",
        include_dashboard=False,
        num_cpus=max(1, math.ceil(resources.get("CPU", 0.0))),
        resources=_custom(resources),
        object_store_memory=OBJECT_STORE_BYTES,
        _temp_dir=str(folder),
    ):
        yield ray.get_runtime_context().gcs_address


@contextmanager
def running(config: ClusterConfig, progress: Progress) -> Iterator[list[Member]]:
    """A cluster that is up for as long as the block."""
    members = start_cluster(config, progress)
    try:
        yield members
    finally:
        ignore_signals()
        stop_cluster(progress)


def start_cluster(config: ClusterConfig, progress: Progress) -> list[Member]:
    """Places and starts all members, nodes first; returns when the proxy can use every node.

    On any failure, Ctrl-C included, it stops everything again.
    """
    if actors := _actors():
        raise ConfigError(f"a cluster is up already ({', '.join(actors)}): run down first")
    _forget()
    try:
        return _start(config, progress)
    except BaseException:
        ignore_signals()
        stop_cluster(progress)
        raise


def cluster_members() -> list[Member]:
    """All members, ordered by actor name; of one that does not answer, `url` says why."""
    calls = {name: actor.describe.remote() for name, actor in _actors().items()}
    if calls:
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=CALL_S)
    members = []
    for name, call in calls.items():
        try:
            members.append(ray.get(call, timeout=0))
        except ray.exceptions.GetTimeoutError:
            members.append(Member(name, url="does not answer"))
        except ray.exceptions.RayError:
            members.append(Member(name, url="restarts"))
    return members


def stop_cluster(progress: Progress) -> None:
    """Drains proxy, then decode, then prefill nodes; one that does not end in time is killed."""
    actors = _actors()
    # The proxy first, so that no request reaches a node that drains; then D, which pulls from P.
    for kind in STOP_ORDER:
        chosen = {name: actor for name, actor in actors.items() if name.startswith(kind)}
        if chosen:
            progress(f"stopping {', '.join(chosen)}")
            _stop(list(chosen.values()))
    _forget()


def _start(config: ClusterConfig, progress: Progress) -> list[Member]:
    *nodes, _ = specs = config.member_specs()
    progress("placing " + ", ".join(spec.name for spec in specs))
    group = placement_group([spec.bundle for spec in specs], name=GROUP, lifetime="detached")
    if not group.wait(PLACE_S):
        wanted = ", ".join(f"{spec.name} {spec.bundle}" for spec in specs)
        raise UnavailableError(f"the Ray cluster has no room for: {wanted}")
    progress(f"loading {config.model}")
    options = [
        {
            "name": spec.name,
            "lifetime": "detached",
            "max_restarts": MAX_RESTARTS,
            "num_cpus": spec.bundle["CPU"],
            "resources": _custom(spec.bundle),
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, index),
            "runtime_env": config.runtime_env,
        }
        for index, spec in enumerate(specs)
    ]
    actors = [
        ray.remote(NodeActor).options(**options[index]).remote(spec.kind, config.node(spec.kind))
        for index, spec in enumerate(nodes)
    ]
    members = _get([actor.start.remote() for actor in actors], START_S, "nodes to start")
    # The proxy gets the nodes' bound ports, so it starts after them.
    progress("starting the proxy")
    urls = {kind: tuple(m.rpc_url for m in members if m.kind == kind) for kind in STOP_ORDER}
    proxy_config = config.proxy_config(urls["prefill"], urls["decode"])
    actor = ray.remote(ProxyActor).options(**options[-1]).remote(proxy_config)
    members += _get([actor.start.remote()], START_S, "the proxy to start")
    _refuse_loopback_between_machines(members)
    progress("waiting until the proxy can use every node")
    _get([actor.wait_ready.remote(READY_S)], READY_S + CALL_S, "the proxy to be ready")
    return members


def _custom(bundle: dict[str, float]) -> dict[str, float]:
    return {name: amount for name, amount in bundle.items() if name != "CPU"}


def _refuse_loopback_between_machines(members: Sequence[Member]) -> None:
    if len({member.node_ip for member in members}) == 1:
        return
    for member in members:
        if member.rpc_url and is_loopback(urlsplit(member.url).hostname or ""):
            raise ConfigError(
                f"the members are on several machines, but {member.engine_id} serves {member.url}: "
                f"set host: auto in {member.kind}.config"
            )


def _get(calls: list[Any], seconds: float, what: str) -> list[Any]:
    """Results of actor calls; what an actor raised on purpose is raised here as it was."""
    try:
        return list(ray.get(calls, timeout=seconds))
    except ray.exceptions.GetTimeoutError as error:
        raise DeadlineExceededError(f"waited {seconds:g} s for {what}") from error
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, TandemError):
            raise error.cause from None
        raise UnavailableError(f"waiting for {what}: {error}") from error
    except ray.exceptions.RayActorError as error:
        if CANNOT_IMPORT in str(error):
            missing = str(error).strip().splitlines()[-1]
            raise ConfigError(
                f"a machine of this Ray cluster cannot run Tandem ({missing}): install it there, "
                "or give runtime_env in the cluster file, with py_modules and pip for instance"
            ) from error
        raise UnavailableError(f"waiting for {what}: {error}") from error


def _actors() -> dict[str, Any]:
    """Handles of our living actors, ordered by name."""
    found = {}
    for name in sorted(ray.util.list_named_actors()):
        if name.partition("-")[0] in STOP_ORDER:
            with suppress(ValueError):  # Ray's answer for an actor that died meanwhile
                found[name] = ray.get_actor(name)
    return found


def _stop(actors: list[Any]) -> None:
    """Ray kills without waiting; on this machine we see for ourselves that processes ended."""
    calls = [actor.close.remote() for actor in actors]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=CLOSE_S)
    processes = []
    for call in done:
        # What an actor raises that ended before it could answer, and a process that is gone.
        with suppress(ray.exceptions.RayError, psutil.NoSuchProcess):
            machine, pid = ray.get(call)
            if machine == ray.util.get_node_ip_address():
                processes.append(psutil.Process(pid))
    for actor in actors:
        ray.kill(actor)
    wait_gone(processes, CALL_S)


def _forget() -> None:
    """Removes what outlives actors: their ports and their placement group."""
    _internal_kv_del("", del_by_prefix=True, namespace=PORTS)
    with suppress(ValueError):  # Ray's answer for "no such group"
        remove_placement_group(ray.util.get_placement_group(GROUP))


@contextmanager
def _ray(problem: str, **options: Any) -> Iterator[None]:
    try:
        try:
            with signals_held():
                ray.init(
                    namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, **options
                )
        except (OSError, RuntimeError, ray.exceptions.RayError) as error:
            raise UnavailableError(f"{problem}: {error}") from error
        yield
    finally:
        ray.shutdown()
