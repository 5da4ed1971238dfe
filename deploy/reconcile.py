"""The next steps from the members that there are to those that are wanted. Pure: no Ray, no clock.

    0 old, 1 old      surge:         +2 new, -1 old, +1 new, -0 old      one more than wanted
                      drain_first:   -1 old, +1 new, -0 old, +0 new      one fewer

One member of a role changes at a time, and the next only once the new one serves. Fewer wanted
members do not wait for that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count, islice
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


def free_names(role: Role, taken: Sequence[str], number: int) -> list[str]:
    """Names of new members, by the lowest numbers that are free."""
    names = (f"{role}-{index}" for index in count())
    return list(islice((name for name in names if name not in taken), max(number, 0)))


def _of_role(config: ClusterConfig, role: Role, seen: Sequence[Seen]) -> list[Step]:
    group = config.group(role)
    is_surge = group.rolling_update == "surge"
    staying = [it for it in seen if it.stage is not Stage.DRAINING]
    num_draining = len(seen) - len(staying)
    # One that failed comes back under its name; an outdated one does not come back as it was.
    dead = [it for it in staying if it.stage is Stage.FAILED and not it.is_current]
    kept = sorted((it for it in staying if it not in dead), key=_first_to_leave)
    current = [it for it in kept if it.is_current]
    outdated = [it for it in kept if not it.is_current]
    is_calm = num_draining == 0 and all(it.stage is Stage.SERVING for it in current)
    surplus = len(kept) - group.replicas
    excess = surplus - (1 if is_surge and outdated else 0)
    num_new, leaving = 0, kept[: max(excess, 0)]
    if surplus < 0:
        # Without room for one more, a new one waits for the end of the one before.
        num_new = -surplus - (0 if is_surge else num_draining)
    elif is_calm and outdated and not leaving:
        num_new, leaving = (1, []) if is_surge and surplus == 0 else (0, outdated[:1])
    again = [it for it in current if it.stage is Stage.FAILED and it.may_start]
    return [
        *(Start(it.name) for it in again if it not in leaving),
        *(Drain(it.name) for it in [*dead, *leaving]),
        *(Start(name) for name in free_names(role, [it.name for it in seen], num_new)),
    ]


def _first_to_leave(member: Seen) -> tuple[bool, bool, int, int]:
    """Before those that serve, that are current, that hold much for others, and low numbers."""
    return member.stage is Stage.SERVING, member.is_current, member.num_busy, -member.index
