"""The next steps from the members that there are to those that are wanted. Pure: no Ray, no clock.

    0 old, 1 old      surge:         +2 new, -0 old, +0 new, -1 old      one more than wanted
                      drain_first:   -0 old, +0 new, -1 old, +1 new      one fewer

One member of a role changes at a time, and the next only once the new one serves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from deploy.config import ClusterConfig, Role


class Stage(StrEnum):
    """How far a member is; a node serves once a canary of every proxy has worked."""

    PLACING = "placing"
    STARTING = "starting"
    WARMING = "warming"
    SERVING = "serving"
    DRAINING = "draining"
    FAILED = "failed"


@dataclass(slots=True, frozen=True)
class Seen:
    """One member now. `is_current`: it runs what the cluster file says.

    `num_busy`: its requests and what it holds for others. `may_start`: a member that failed has
    waited long enough.
    """

    name: str
    role: Role
    stage: Stage
    is_current: bool = True
    num_busy: int = 0
    may_start: bool = True

    @property
    def index(self) -> int:
        """The number in its name."""
        return int(self.name.rpartition("-")[2])


@dataclass(slots=True, frozen=True)
class Start:
    """A member of this name begins a life."""

    name: str


@dataclass(slots=True, frozen=True)
class Drain:
    """The member ends once nobody waits for it."""

    name: str


Step: TypeAlias = Start | Drain


def next_steps(config: ClusterConfig, seen: Sequence[Seen]) -> list[Step]:
    """Steps that may be taken now, of all roles; none where all is as wanted or under way."""
    return [
        step
        for role in ("proxy", "decode", "prefill")
        for step in _of_role(config, role, [it for it in seen if it.role == role])
    ]


def _of_role(config: ClusterConfig, role: Role, seen: Sequence[Seen]) -> list[Step]:
    group = config.group(role)
    wanted = group.replicas
    staying = [it for it in seen if it.stage is not Stage.DRAINING]
    current = [it for it in staying if it.is_current]
    outdated = [it for it in staying if not it.is_current]
    # One that failed comes back under its name; an outdated one does not come back as it was.
    again: list[Step] = [
        Start(it.name) for it in current if it.stage is Stage.FAILED and it.may_start
    ]
    dead: list[Step] = [Drain(it.name) for it in outdated if it.stage is Stage.FAILED]
    missing = wanted - len(staying) + len(dead)
    if missing > 0:
        return [*again, *dead, *_starts(role, seen, missing)]
    surplus = len(staying) - len(dead) - wanted
    outdated = [it for it in outdated if it.stage is not Stage.FAILED]
    if not outdated:
        leaving = sorted(current, key=_last_to_leave)[:surplus]
        return [*again, *dead, *(Drain(it.name) for it in leaving)]
    is_calm = len(staying) == len(seen) and all(it.stage is Stage.SERVING for it in current)
    if not is_calm:
        return [*again, *dead]
    match group.rolling_update:
        case "surge" if surplus == 0:
            return [*again, *dead, *_starts(role, seen, 1)]
        case _:
            oldest = min(outdated, key=_last_to_leave)
            return [*again, *dead, Drain(oldest.name)]


def _last_to_leave(member: Seen) -> tuple[bool, int, int]:
    """Members that serve, that hold most for others, and of low numbers leave last."""
    return member.stage is Stage.SERVING, member.num_busy, -member.index


def _starts(role: Role, seen: Sequence[Seen], number: int) -> list[Step]:
    """New members, by the lowest numbers that are free."""
    taken = {it.index for it in seen}
    free = [index for index in range(len(taken) + number) if index not in taken]
    return [Start(f"{role}-{index}") for index in free[:number]]
