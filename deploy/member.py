"""One life of a member on Ray: its place, its process, what it is told, and its end.

    placing ──▶ starting ──▶ warming ──▶ serving ──▶ draining ──▶ gone
       └───────────┴────────────┴───────────┴──▶ failed: the controller begins the next life

Each life has a placement group and an actor of its own, both under one name, so that a controller
that was lost finds them, and what is removed is never another life's.
"""

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import msgspec
import ray
import structlog
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from deploy.actors import Birth, NodeActor, ProxyActor, Told
from deploy.config import ClusterConfig, Role
from deploy.placement import Machine, choose, why_none
from engine.errors import DeadlineExceededError, TandemError, UnavailableError
from proxy.config import ProxyConfig
from serving.config import NodeConfig

NAMESPACE: Final = "tandem"
"""Of all actors, also where another application of Ray's has begun them."""
NODE_ID: Final = "ray.io/node-id"
LOOK_S: Final = 0.5
CALL_S: Final = 10.0
LISTEN_S: Final = 4.0
PLACE_S: Final = 5.0
"""For a placement group on the machine that was chosen, before the next one is tried."""
START_S: Final = 1800.0
"""Until a server runs: Ray may have to install a `runtime_env`, and weights may be large."""
SILENT_S: Final = 30.0
LOST_S: Final = 8.0
"""A member that answers nothing for so long is taken for dead, sooner if no proxy reaches it."""
DRAIN_MARGIN_S: Final = 15.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.5, 30.0
CANNOT_IMPORT: Final = "failed to import on the worker"  # Ray's words

T = TypeVar("T")
log = structlog.get_logger()


class Desired(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster as it should be; each change has the next `generation`. 0: nothing yet."""

    generation: int = 0
    config: ClusterConfig | None = None


class MemberLostError(UnavailableError):
    """A member's process died, hangs, or says that it failed."""


@dataclass(slots=True, frozen=True)
class Spec:
    """All of a member that a restart would change, and its digest."""

    config: NodeConfig | ProxyConfig
    bundle: Mapping[str, float]
    labels: Mapping[str, str]
    runtime_env: Mapping[str, Any]

    @classmethod
    def of(cls, config: ClusterConfig, role: Role) -> "Spec":
        """Raises ConfigError for a wrong option."""
        group = config.group(role)
        options = config.proxy_config() if role == "proxy" else config.node(role)
        return cls(options, group.bundle(), group.labels, config.runtime_env)

    @property
    def digest(self) -> str:
        """Equal for equal members."""
        fields = (self.config, self.bundle, self.labels, self.runtime_env)
        return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:16]


@dataclass(slots=True, frozen=True)
class Home:
    """The parts of a controller that its members' lives need.

    `desired` and `proxy_urls` ask for the present ones. `is_reached`: some proxy reaches the node,
    or it is none. `placing`: one life is placed at a time, so that each sees what the one before
    has reserved.
    """

    desired: Callable[[], Desired]
    proxy_urls: Callable[[], tuple[str, ...]]
    is_reached: Callable[["Member"], bool]
    placing: asyncio.Lock


@dataclass(slots=True, eq=False)
class Member:
    """A life; `live` is all of it. `told` is what its actor said last.

    `spec` is what to start; a life that was found has none. `former_port`: of a proxy, where its
    clients ask. `is_outdated`: an operator wants it replaced. `num_short`: lives of this name
    in a row, until now, that did not come to serve.
    """

    birth: Birth
    home: Home
    spec: Spec | None = None
    former_port: int = 0
    num_short: int = 0
    is_outdated: bool = False
    has_served: bool = False
    problem: str = ""
    told: Told | None = None
    actor: Any = None
    group: PlacementGroup | None = None
    task: asyncio.Task[None] | None = None
    not_before: float = 0.0
    _leaving_since: float | None = None
    _held_generation: int = 0

    @property
    def name(self) -> str:
        return self.birth.name

    @property
    def role(self) -> Role:
        return self.birth.role

    @property
    def actor_name(self) -> str:
        """The name of its actor and of its placement group."""
        return f"{self.birth.cluster}/{self.name}.{self.birth.life}"

    @property
    def is_leaving(self) -> bool:
        return self._leaving_since is not None

    @property
    def is_over(self) -> bool:
        return self.task is not None and self.task.done()

    @property
    def is_running(self) -> bool:
        """True while its server serves; whether clients' requests come is the proxies' matter."""
        return not self.is_over and self.told is not None and self.told.phase == "running"

    def leave(self) -> None:
        """It drains from now on, and ends."""
        if self._leaving_since is None:
            self._leaving_since = asyncio.get_running_loop().time()

    async def live(self) -> None:
        """From its place to its end, well or with a `problem`; everything is given back then."""
        try:
            if self.actor is None:
                await self._place()
                await self._create()
            await self._follow()
        except TandemError as error:
            self.problem = str(error)
        # Broad: what Ray raises has no common root, and a life must end in any case.
        except Exception as error:
            log.exception("a life ended on an unexpected error", member=self.name)
            self.problem = f"{type(error).__name__}: {error}"
        finally:
            await self._clean()
        short = 0 if self.has_served else self.num_short + 1
        self.num_short = short
        pause_s = min(MIN_PAUSE_S * 2 ** min(short, 10), MAX_PAUSE_S)
        self.not_before = asyncio.get_running_loop().time() + pause_s

    async def _place(self) -> None:
        """Reserves its share of a machine. Raises UnavailableError where none has room."""
        config = self.home.desired().config
        assert config is not None and self.spec is not None
        group = config.group(self.role)
        async with self.home.placing:
            machines = await in_thread(alive_machines, self.birth.cluster)
            chosen = choose(self.role, group, machines)
            for machine in chosen:
                self.group = group_of_life = await in_thread(
                    placement_group,
                    [dict(self.spec.bundle)],
                    name=self.actor_name,
                    lifetime="detached",
                    bundle_label_selector=[{NODE_ID: machine.node_id}],
                )
                if await in_thread(group_of_life.wait, PLACE_S):
                    return
                # Somebody without a placement group has taken the room.
                await self._clean()
        if chosen:
            wanted = ", ".join(f"{name} {it:g}" for name, it in self.spec.bundle.items())
            raise UnavailableError(f"another program of this Ray holds what was free: {wanted}")
        raise UnavailableError(why_none(self.role, group, machines))

    async def _create(self) -> None:
        spec = self.spec
        assert spec is not None
        config: NodeConfig | ProxyConfig = spec.config
        options = {
            "name": self.actor_name,
            "namespace": NAMESPACE,
            "lifetime": "detached",
            "max_restarts": 0,  # the next life is the controller's to begin
            "num_cpus": spec.bundle["CPU"],
            "num_gpus": spec.bundle.get("GPU", 0.0),
            "resources": {k: v for k, v in spec.bundle.items() if k not in ("CPU", "GPU")},
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self.group, 0),
            "runtime_env": dict(spec.runtime_env),
        }
        if isinstance(config, ProxyConfig):
            # Clients know the port, also where any was right at first.
            port = config.port or self.former_port
            kind: type[Any] = ProxyActor
            config = msgspec.structs.replace(config, port=port)
        else:
            urls = self.home.proxy_urls()
            kind = NodeActor
            config = msgspec.structs.replace(config, proxy=urls)
        self.actor = await in_thread(ray.remote(kind).options(**options).remote, self.birth, config)

    async def _follow(self) -> None:
        """Watches the actor, until it has ended as it was told.

        Raises MemberLostError when it dies, hangs, fails, or does not end in time.
        """
        now = asyncio.get_running_loop().time
        began = last_heard = now()
        while True:
            try:
                self.told = await answer(self.actor.describe.remote(), LISTEN_S)
                last_heard = now()
            except DeadlineExceededError as error:
                if now() - last_heard > self._patience_s():
                    raise MemberLostError("its process hangs, or its machine is gone") from error
                continue
            match self.told.phase:
                case "failed":
                    raise MemberLostError(self.told.problem)
                case "ended":
                    return
                case "starting" if now() - began > START_S:
                    raise MemberLostError(f"it has not started within {START_S:g} s")
                case "running":
                    await self._tell(self.told)
            # A server that starts may read weights without a pause.
            if self.told.silent_s > SILENT_S and self.told.phase != "starting":
                raise MemberLostError(f"its server stands still for {self.told.silent_s:.0f} s")
            if self._leaving_since is not None:
                await answer(self.actor.drain.remote())
                limit_s = self._drain_s() + DRAIN_MARGIN_S
                if now() - self._leaving_since > limit_s:
                    raise MemberLostError(f"it has not ended within {limit_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _tell(self, told: Told) -> None:
        """Passes on what has changed since."""
        urls, desired = self.home.proxy_urls(), self.home.desired()
        if self.role != "proxy" and urls and told.proxies != urls:
            await answer(self.actor.register_with.remote(urls))
        if self._held_generation != desired.generation:
            await answer(self.actor.hold.remote(msgspec.json.encode(desired)))
            self._held_generation = desired.generation

    def _patience_s(self) -> float:
        if self.told is None or self.told.phase == "starting":
            return START_S
        return SILENT_S if self.home.is_reached(self) else LOST_S

    def _drain_s(self) -> float:
        config = self.home.desired().config
        if config is None:
            return 0.0
        options = config.proxy_config() if self.role == "proxy" else config.node(self.role)
        return options.drain_timeout

    async def _clean(self) -> None:
        """Kills the process and gives its share of the machine back."""
        actor, self.actor, group, self.group = self.actor, None, self.group, None
        # Ray's words for what is gone already, or for a machine that is.
        with suppress(Exception):
            if actor is not None:
                await in_thread(ray.kill, actor)
        with suppress(Exception):
            if group is not None:
                await in_thread(remove_placement_group, group)


async def in_thread(call: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """A blocking call of Ray's. Raises DeadlineExceededError after `CALL_S`; it may go on then."""
    try:
        async with asyncio.timeout(CALL_S):
            return await asyncio.to_thread(call, *arguments, **options)
    except TimeoutError as error:
        raise DeadlineExceededError(f"Ray has not answered within {CALL_S:g} s") from error


async def answer(call: Any, seconds: float = CALL_S) -> Any:
    """An actor's answer. Raises MemberLostError if it is dead, DeadlineExceededError if late."""
    try:
        async with asyncio.timeout(seconds):
            return await asyncio.wrap_future(call.future())
    except TimeoutError as error:
        raise DeadlineExceededError(f"no answer within {seconds:g} s") from error
    except ray.exceptions.RayTaskError as error:
        raise MemberLostError(f"it failed: {error.cause}") from error
    except ray.exceptions.RayError as error:
        raise MemberLostError(why(error)) from error


def why(error: ray.exceptions.RayError) -> str:
    """Ray's reason in one line."""
    text = str(error).strip()
    if CANNOT_IMPORT in text:
        return (
            f"a machine of this Ray cannot run Tandem ({text.splitlines()[-1]}): install it there, "
            "or give runtime_env in the cluster file, with py_modules and pip for instance"
        )
    told = [line.strip() for line in text.splitlines() if line.strip()]
    # Of an error in the actor's own code, and in the making of what it needs, the last line is it.
    is_last = "creation task" in text or isinstance(error, ray.exceptions.RuntimeEnvSetupError)
    return told[-1 if is_last else 0] if told else type(error).__name__


def alive_machines(cluster: str) -> list[Machine]:
    """Ray's machines, with what placement groups have reserved, and this cluster's members."""
    machines = {
        it["NodeID"]: Machine(it["NodeID"], it["NodeManagerAddress"], it["Resources"], it["Labels"])
        for it in ray.nodes()
        if it["Alive"]
    }
    for group in placement_group_table().values():
        for index, node_id in group["bundles_to_node_id"].items():
            if node_id not in machines or group["state"] == "REMOVED":
                continue
            machines[node_id].reserved.update(group["bundles"][index])
            owner, _, name = group["name"].partition("/")
            if owner == cluster:
                machines[node_id].roles[name.rpartition("-")[0]] += 1
    return list(machines.values())


def actor_names() -> list[str]:
    """Names of all actors of clusters on this Ray."""
    found = ray.util.list_named_actors(all_namespaces=True)
    return [it["name"] for it in found if it["namespace"] == NAMESPACE]


def groups_of(cluster: str) -> dict[str, PlacementGroup]:
    """By name. Ray finds a group by its name only for the application that has made it."""
    return {
        it["name"]: PlacementGroup(ray.PlacementGroupID(bytes.fromhex(it["placement_group_id"])))
        for it in placement_group_table().values()
        if it["name"].startswith(f"{cluster}/") and it["state"] != "REMOVED"
    }


def port_of(url: str) -> int:
    """0 for what has no port."""
    return urlsplit(url).port or 0
