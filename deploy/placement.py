"""The machine of each member. Pure: machines and what is reserved on them are given.

Ray places a bundle where it likes; a member here has a placement group of its own, so that members
can come and go one by one, and the choice of its machine is made here and told to Ray by the
machine's label. What others take meanwhile Ray alone knows: the next machine is tried then.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from deploy.config import ROLES, ClusterConfig, Group, Role
from deploy.reconcile import free_names
from engine.errors import ConfigError
from serving.rpc.address import is_loopback

TINY = 1e-6
"""Ray counts in ten-thousandths."""


@dataclass(slots=True)
class Machine:
    """A machine of Ray: what it has, what groups have reserved of it, and its members' roles."""

    node_id: str
    address: str
    total: Mapping[str, float]
    labels: Mapping[str, str] = field(default_factory=dict)
    reserved: Counter[str] = field(default_factory=Counter)
    roles: Counter[str] = field(default_factory=Counter)

    def lacks(self, bundle: Mapping[str, float]) -> dict[str, float]:
        """By resource how much more the bundle takes than is left."""
        left = {name: self.total.get(name, 0.0) - self.reserved[name] for name in bundle}
        return {
            name: amount - left[name]
            for name, amount in bundle.items()
            if amount > left[name] + TINY
        }

    def add(self, role: str, bundle: Mapping[str, float]) -> None:
        """Reserves the bundle of one more member."""
        self.reserved.update(bundle)
        self.roles[role] += 1


def choose(role: str, group: Group, machines: Sequence[Machine]) -> list[Machine]:
    """Machines for one more member of a role, the best first; empty if none has room.

    SPREAD prefers those with the fewest members of the role, PACK those with the most.
    """
    fit = [
        machine
        for machine in machines
        if group.labels.items() <= machine.labels.items() and not machine.lacks(group.bundle())
    ]
    match group.strategy:
        case "PACK":
            fit.sort(key=lambda it: (-it.roles[role], -it.roles.total(), it.node_id))
        case "SPREAD":
            fit.sort(key=lambda it: (it.roles[role], it.roles.total(), it.node_id))
        case "STRICT_SPREAD":
            fit = [it for it in fit if not it.roles[role]]
            fit.sort(key=lambda it: (it.roles.total(), it.node_id))
    return fit


def why_none(role: str, group: Group, machines: Sequence[Machine]) -> str:
    """The reason, in words, that `choose` found nothing."""
    if not machines:
        return "no machine of this Ray is alive"
    labelled = [it for it in machines if group.labels.items() <= it.labels.items()]
    if not labelled:
        wanted = ", ".join(f"{name}={value}" for name, value in group.labels.items())
        return f"no machine has the labels {wanted}"
    roomy = [it for it in labelled if not it.lacks(group.bundle())]
    if roomy:
        return f"STRICT_SPREAD: each machine with room has a {role} member already"
    nearest = min(labelled, key=lambda it: sum(it.lacks(group.bundle()).values()))
    lack = ", ".join(f"{name} {amount:g}" for name, amount in nearest.lacks(group.bundle()).items())
    return f"no machine has room for {_words(group.bundle())}; {nearest.address} lacks {lack}"


def _words(bundle: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {amount:g}" for name, amount in bundle.items())


@dataclass(slots=True, frozen=True)
class Planned:
    """A member that would be started, and its machine; without one, `problem` says why."""

    name: str
    role: Role
    machine: Machine | None
    problem: str = ""


def plan(config: ClusterConfig, machines: Sequence[Machine], there: Sequence[str]) -> list[Planned]:
    """The machine of each member of `config` but those that are `there`, one after the other."""
    planned = []
    for role in ROLES:
        group = config.group(role)
        num_there = sum(name.startswith(f"{role}-") for name in there)
        for name in free_names(role, there, group.replicas - num_there):
            chosen = choose(role, group, machines)
            problem = "" if chosen else why_none(role, group, machines)
            planned.append(Planned(name, role, next(iter(chosen), None), problem))
            if chosen:
                chosen[0].add(role, group.bundle())
    return planned


def check_room(planned: Sequence[Planned]) -> None:
    """Raises ConfigError for members that no machine has room for."""
    if lost := [f"{it.name}: {it.problem}" for it in planned if it.machine is None]:
        raise ConfigError("; ".join(lost))


def check_hosts(
    config: ClusterConfig, planned: Sequence[Planned], there: Collection[str] = ()
) -> None:
    """Raises ConfigError for members that serve loopback, on more than one machine.

    `there`: the addresses of machines with members already.
    """
    addresses = {it.machine.address for it in planned if it.machine is not None}.union(there)
    for role in ROLES if len(addresses) > 1 else ():
        options = config.proxy_config() if role == "proxy" else config.node(role)
        if config.group(role).replicas and is_loopback(options.host):
            raise ConfigError(
                f"the members come to {len(addresses)} machines, and {role} serves {options.host}: "
                f"set host: auto in {role}.config"
            )
