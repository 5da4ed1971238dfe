"""The one owner of a cluster on Ray: keeps its members as the cluster file wants them.

    apply, scale ──▶ desired ──▶ reconcile.next_steps ──▶ lives of members (member.py)
                                   ▲                              │
                                   └── every half second: what their actors and proxies tell

A detached actor, alone under its name, which Ray starts again for ever. It holds nothing that
traffic needs: nodes register with proxies themselves. What it must know survives in its members,
each of which holds a copy of the desired state; a new life finds them by their names.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

import msgspec
import ray
import structlog

from deploy.actors import Birth, NodeSeen, Told
from deploy.autoscaler import Autoscaler, Pool
from deploy.config import ROLES, ClusterConfig, Role
from deploy.member import (
    CALL_S,
    NAMESPACE,
    Desired,
    Home,
    Member,
    Spec,
    actor_names,
    answer,
    groups_of,
    in_thread,
    port_of,
)
from deploy.reconcile import Drain, Seen, Stage, Start, next_steps
from engine.errors import ConfigError, TandemError
from serving.process import configure_logging
from serving.rpc.messages import NodeInfo

LOOP_S: Final = 0.5
MAX_EVENTS: Final = 200
STOP_ORDER: Final[tuple[Role, ...]] = ("proxy", "decode", "prefill")
FIXED: Final = ("name", "model", "cluster_token")

log = structlog.get_logger()


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One member as operators see it; `problem` says why it does not serve."""

    name: str
    role: Role
    stage: Stage
    is_current: bool
    life: int
    problem: str
    is_wrong_option: bool
    told: Told | None


class ClusterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The members that there are beside those that are wanted; `events`: time and words."""

    generation: int = 0
    config: ClusterConfig | None = None
    members: tuple[MemberStatus, ...] = ()
    events: tuple[tuple[float, str], ...] = ()

    def count(self, role: Role) -> int:
        """Members of the role that serve as they should."""
        return sum(
            it.role == role and it.stage is Stage.SERVING and it.is_current for it in self.members
        )

    @property
    def is_whole(self) -> bool:
        """True while all that is wanted serves, and nothing else is left."""
        if self.config is None:
            return False
        counts = {role: self.count(role) for role in ROLES}
        wanted = {role: self.config.group(role).replicas for role in ROLES}
        return counts == wanted and sum(counts.values()) == len(self.members)


class Controller:
    """The work of the actor, on one event loop; operators' calls return at once."""

    def __init__(self, cluster: str) -> None:
        self._cluster = cluster
        self._desired = Desired()
        self._specs: dict[Role, Spec] = {}
        self._members: dict[str, Member] = {}
        self._lives: Counter[str] = Counter()
        self._ports: dict[str, int] = {}  # of proxies, by name: clients know them
        self._events: deque[tuple[float, str]] = deque(maxlen=MAX_EVENTS)
        self._is_stopping = False
        self._autoscaler = Autoscaler()
        self._home = Home(
            lambda: self._desired, self._proxy_urls, self._is_reached, placing=asyncio.Lock()
        )
        self._found = asyncio.Event()

    # What operators ask for.

    async def apply(self, config: ClusterConfig, generation: int) -> int:
        """The cluster shall be so from now on; returns the new generation.

        `generation` is the one that the caller has looked at. Raises ConfigError where somebody
        else has changed the cluster since, and for a change that no running cluster can make.
        """
        await self._found.wait()
        if self._is_stopping:
            raise ConfigError("the cluster is being stopped: run down until it is gone")
        if generation != self._desired.generation:
            raise ConfigError("somebody else has changed the cluster meanwhile: look again")
        old = self._desired.config
        for key in FIXED if old is not None else ():
            if getattr(config, key) != getattr(old, key):
                raise ConfigError(
                    f"{key} of a running cluster cannot change: give the new one another name, or "
                    "run down first"
                )
        return self._want(config if old is None else keep_scaled(config, old), "applied")

    async def scale(self, role: Role, replicas: int) -> int:
        """The new generation. Raises ConfigError for a cluster that would be none."""
        config = await self._wanted()
        changed = with_replicas(config, role, replicas)
        changed.check()
        return self._want(changed, f"{role} is {replicas}")

    async def drain(self, name: str) -> int:
        """The member leaves, and its role is one smaller. Raises ConfigError for another name."""
        config = await self._wanted()
        member = self._named(name)
        generation = await self.scale(member.role, config.group(member.role).replicas - 1)
        member.leave()
        return generation

    async def restart(self, names: Sequence[str]) -> list[str]:
        """Replaces members one after the other; returns their names.

        `names`: of members or roles; empty for all nodes. Raises ConfigError for others.
        """
        await self._wanted()
        chosen = [it for name in names or ("prefill", "decode") for it in self._chosen(name)]
        for member in chosen:
            member.is_outdated = True
        unique = sorted({it.name for it in chosen})
        self._event(f"restart of {', '.join(unique)}")
        return unique

    async def stop(self) -> None:
        """All members leave: proxies, then decode, then prefill nodes."""
        await self._found.wait()
        self._is_stopping = True
        self._event("stopping")

    async def status(self) -> ClusterStatus:
        """All members, wanted or not."""
        await self._found.wait()
        members = tuple(
            MemberStatus(
                name=it.name,
                role=it.role,
                stage=self._stage_of(it),
                is_current=self._is_current(it),
                life=it.birth.life,
                problem=self._problem_of(it),
                is_wrong_option=it.told is not None and it.told.is_wrong_option,
                told=None if it.told is None else msgspec.structs.replace(it.told, nodes={}),
            )
            for it in sorted(self._members.values(), key=lambda it: (ROLES.index(it.role), it.name))
        )
        return ClusterStatus(
            generation=self._desired.generation,
            config=self._desired.config,
            members=members,
            events=tuple(self._events),
        )

    async def _wanted(self) -> ClusterConfig:
        await self._found.wait()
        if self._desired.config is None or self._is_stopping:
            raise ConfigError(f"no cluster {self._cluster} is up: apply one")
        return self._desired.config

    def _named(self, name: str) -> Member:
        member = self._members.get(name)
        if member is None or member.is_leaving:
            staying = sorted(it.name for it in self._members.values() if not it.is_leaving)
            raise ConfigError(f"no member is called {name}; there are {', '.join(staying)}")
        return member

    def _chosen(self, name: str) -> list[Member]:
        """The member of that name, or all of that role."""
        if name not in ROLES:
            return [self._named(name)]
        return [it for it in self._members.values() if it.role == name and not it.is_leaving]

    def _want(self, config: ClusterConfig, why: str) -> int:
        # As members will tell it to a later life, in which 1 may be 1.0: digests must stay equal.
        config = msgspec.json.decode(msgspec.json.encode(config), type=ClusterConfig)
        self._specs = {role: Spec.of(config, role) for role in ROLES}
        generation = self._desired.generation + 1
        self._desired = Desired(generation=generation, config=config)
        self._event(f"generation {generation}: {why}")
        return generation

    def _event(self, text: str) -> None:
        log.info(text, cluster=self._cluster)
        self._events.append((time.time(), text))

    # The loop.

    async def run(self) -> None:
        """Looks after the cluster, for ever."""
        await self._find_members()
        self._found.set()
        while True:
            try:
                self._reconcile()
            # Broad: a cluster's only owner must not cease to look after it.
            except Exception:
                log.exception("a look at the cluster failed")
            await asyncio.sleep(LOOP_S)

    async def _find_members(self) -> None:
        """Members of an earlier life of this controller, and what they know of the cluster."""
        for actor_name in await in_thread(actor_names):
            owner, _, life = actor_name.partition("/")
            if owner == self._cluster and "." in life:
                with suppress(TandemError, ValueError):
                    await self._find_member(actor_name)
        if self._members:
            self._event(f"found {', '.join(sorted(self._members))}")

    async def _find_member(self, actor_name: str) -> None:
        actor = await in_thread(ray.get_actor, actor_name, NAMESPACE)
        told = await answer(actor.describe.remote())
        held = msgspec.json.decode(await answer(actor.held.remote()), type=Desired)
        if held.generation > self._desired.generation and held.config is not None:
            self._desired = held
            self._specs = {role: Spec.of(held.config, role) for role in ROLES}
        group = (await in_thread(groups_of, self._cluster)).get(actor_name)
        member = Member(told.birth, self._home, told=told, actor=actor, group=group)
        self._begin(member)
        if told.phase in ("draining", "ended"):
            member.leave()

    def _reconcile(self) -> None:
        for member in list(self._members.values()):
            if member.is_over and (member.is_leaving or self._is_stopping):
                del self._members[member.name]
                self._event(f"{member.name} has left")
        if self._is_stopping:
            self._stop_in_order()
        elif self._desired.config is not None:
            self._scale_by_load(self._desired.config)
            seen = [self._seen(it) for it in self._members.values()]
            for step in next_steps(self._desired.config, seen):
                self._take(step)

    def _scale_by_load(self, config: ClusterConfig) -> None:
        if config.prefill.autoscaling is None and config.decode.autoscaling is None:
            return
        decisions = self._autoscaler.decide(
            asyncio.get_running_loop().time(),
            Pool(config.prefill.replicas, config.prefill.autoscaling, self._infos("prefill")),
            Pool(config.decode.replicas, config.decode.autoscaling, self._infos("decode")),
        )
        for role, decision in decisions.items():
            if decision.num_replicas != config.group(role).replicas:
                config = with_replicas(config, role, decision.num_replicas)
                self._want(config, f"{role} is {decision.num_replicas}: {decision.reason}")

    def _infos(self, role: Role) -> list[NodeInfo]:
        """Descriptions of the serving nodes of a role."""
        serving = [
            it
            for it in self._members.values()
            if it.role == role and self._stage_of(it) is Stage.SERVING
        ]
        views = [
            next((view for view in self._views(it) if view is not None), None) for it in serving
        ]
        return [view.info for view in views if view is not None]

    def _take(self, step: Start | Drain) -> None:
        match step:
            case Start(name):
                self._start(name)
            case Drain(name):
                self._members[name].leave()
                self._event(f"{name} leaves")

    def _stop_in_order(self) -> None:
        """Proxies first, so that no request reaches a node that drains; then D, which pulls."""
        for role in STOP_ORDER:
            members = [it for it in self._members.values() if it.role == role]
            for member in members:
                member.leave()
            if members:
                return

    def _start(self, name: str) -> None:
        role: Role = next(role for role in ROLES if name.startswith(f"{role}-"))
        former, spec = self._members.get(name), self._specs[role]
        if former is not None:
            self._event(f"{name} begins again: {former.problem}")
        birth = Birth(
            cluster=self._cluster,
            name=name,
            role=role,
            life=self._lives[name] + 1,
            digest=spec.digest,
            desired=msgspec.json.encode(self._desired),
        )
        member = Member(birth, self._home, spec)
        # Unless another program has taken the port meanwhile: then any is better than none.
        if former is None or former.told is None or not former.told.is_wrong_option:
            member.former_port = self._ports.get(name, 0)
        if former is not None:
            member.num_short = former.num_short
        self._begin(member)

    def _begin(self, member: Member) -> None:
        self._lives[member.name] = max(self._lives[member.name], member.birth.life)
        self._members[member.name] = member
        member.task = asyncio.create_task(member.live())

    # What members say.

    def _seen(self, member: Member) -> Seen:
        stage = self._stage_of(member)
        if stage is Stage.SERVING and not member.has_served:
            member.has_served = True
            if member.role == "proxy" and member.told is not None:
                self._ports[member.name] = port_of(member.told.url)
            self._event(f"{member.name} serves")
        return Seen(
            member.name,
            member.role,
            stage=stage,
            is_current=self._is_current(member),
            num_busy=self._num_busy(member),
            may_start=asyncio.get_running_loop().time() >= member.not_before,
        )

    def _is_current(self, member: Member) -> bool:
        return not member.is_outdated and member.birth.digest == self._specs[member.role].digest

    def _stage_of(self, member: Member) -> Stage:
        if member.is_leaving:
            return Stage.DRAINING
        if member.is_over:
            return Stage.FAILED
        if not member.is_running:
            return Stage.PLACING if member.actor is None else Stage.STARTING
        return Stage.SERVING if self._serves(member) else Stage.WARMING

    def _serves(self, member: Member) -> bool:
        """A node serves if every proxy says so; a proxy if it knows the model and a node serves."""
        if member.role == "proxy":
            assert member.told is not None
            return member.told.knows_model and any(
                it.stage == "serving" for it in member.told.nodes.values()
            )
        views = self._views(member)
        return bool(views) and all(it is not None and it.stage == "serving" for it in views)

    def _problem_of(self, member: Member) -> str:
        views = [it for it in self._views(member) if it is not None]
        return member.problem or next((it.problem for it in views if it.problem), "")

    def _num_busy(self, member: Member) -> int:
        infos = [it.info for it in self._views(member) if it is not None]
        counts = [it.num_requests_running + it.num_requests_waiting + it.num_held for it in infos]
        return max(counts, default=0)

    def _views(self, member: Member) -> list[NodeSeen | None]:
        """A node as each proxy sees it; None from one that does not know it."""
        engine_id = "" if member.told is None else member.told.engine_id
        return [proxy.nodes.get(engine_id) for proxy in self._proxies()]

    def _is_reached(self, member: Member) -> bool:
        views = self._views(member)
        return member.role == "proxy" or any(it is not None and it.stage != "away" for it in views)

    def _proxy_urls(self) -> tuple[str, ...]:
        return tuple(proxy.rpc_url for proxy in self._proxies())

    def _proxies(self) -> list[Told]:
        """The last word of each proxy that runs."""
        running = [it for it in self._members.values() if it.role == "proxy" and it.is_running]
        return [it.told for it in sorted(running, key=lambda it: it.name) if it.told is not None]


def with_replicas(config: ClusterConfig, role: Role, replicas: int) -> ClusterConfig:
    """The same cluster with so many members of a role."""
    group = msgspec.structs.replace(config.group(role), replicas=replicas)
    return msgspec.structs.replace(config, **{role: group})


def keep_scaled(config: ClusterConfig, old: ClusterConfig) -> ClusterConfig:
    """`config` with as many members as there are where the load decides, not the file."""
    for name, group in (("prefill", config.prefill), ("decode", config.decode)):
        if group.autoscaling is not None:
            replicas = group.autoscaling.bounded(getattr(old, name).replicas)
            changed = msgspec.structs.replace(group, replicas=replicas)
            config = msgspec.structs.replace(config, **{name: changed})
    return config


class ControllerActor:
    """The part that Ray calls. No method is async: see `deploy.actors.ServerActor`."""

    def __init__(self, cluster: str) -> None:
        configure_logging("info")
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="controller", daemon=True).start()
        self._controller = Controller(cluster)
        self._work = asyncio.run_coroutine_threadsafe(self._controller.run(), self._loop)

    def ask(self, method: str, *arguments: Any) -> Any:
        """The result of a public coroutine of `Controller`."""
        coroutine = getattr(self._controller, method)(*arguments)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(CALL_S)
