"""Steps towards the members that are wanted: whatever happens meanwhile, enough of them serve."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import chain, count
from typing import Literal

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)
from hypothesis.stateful import run_state_machine_as_test as run_machine

from deploy.config import ROLES, ClusterConfig, Role
from deploy.reconcile import Drain, Seen, Stage, Start, Step, next_steps

Rolling = Literal["surge", "drain_first"]
NEXT = {
    Stage.PLACING: Stage.STARTING,
    Stage.STARTING: Stage.WARMING,
    Stage.WARMING: Stage.SERVING,
}
MAX_REPLICAS = 4
ROUNDS_PER_MEMBER = 6
"""Its start, three stages, and another one's drain and end."""


@cache
def wanting(replicas: int, rolling: Rolling = "surge", role: Role = "decode") -> ClusterConfig:
    """A cluster of one role."""
    config = ClusterConfig(model="m")
    groups = {
        each: msgspec.structs.replace(
            config.group(each), replicas=replicas * (each == role), rolling_update=rolling
        )
        for each in ROLES
    }
    return msgspec.structs.replace(config, **groups)


@dataclass
class Cluster:
    """Members of one role as a controller has them, without processes."""

    wanted: int
    rolling: Rolling
    role: Role

    def __post_init__(self) -> None:
        self.members: dict[str, Seen] = {}
        # Those that drain because a newer member replaces them.
        self.replaced: set[str] = set()
        # Numbers that the steps of this look may not give to another member.
        self.taken: set[int] = set()

    @property
    def staying(self) -> list[Seen]:
        return [it for it in self.members.values() if it.stage is not Stage.DRAINING]

    @property
    def num_serving(self) -> int:
        return sum(it.stage is Stage.SERVING for it in self.members.values())

    @property
    def num_alive(self) -> int:
        """Less those that drain because fewer are wanted."""
        staying = sum(it.stage is not Stage.FAILED for it in self.staying)
        return staying + len(self.replaced)

    @property
    def num_kept(self) -> int:
        """Members that will serve, also after a failure."""
        return sum(it.is_current or it.stage is not Stage.FAILED for it in self.staying)

    @property
    def is_whole(self) -> bool:
        members = self.members.values()
        return len(members) == self.wanted and all(
            it.stage is Stage.SERVING and it.is_current for it in members
        )

    def steps(self) -> list[Step]:
        self.taken = {it.index for it in self.members.values()}
        config = wanting(self.wanted, self.rolling, self.role)
        return next_steps(config, list(self.members.values()))

    def take(self, step: Step) -> None:
        name = step.name
        match step:
            case Start():
                former = self.members.get(name)
                if former is None:
                    free = next(index for index in count() if index not in self.taken)
                    assert name == f"{self.role}-{free}"
                    self.taken.add(free)
                else:
                    assert former.stage is Stage.FAILED and former.may_start and former.is_current
                self.members[name] = Seen(name, self.role, Stage.PLACING)
            case Drain():
                member = self.members[name]
                assert member.stage is not Stage.DRAINING
                most = self.wanted + (self.rolling == "surge")
                if not member.is_current and self.num_kept <= most:
                    self.replaced.add(name)
                self.drain(name)

    def drain(self, name: str) -> None:
        """One that failed holds nothing, and is gone at once."""
        if self.members[name].stage is Stage.FAILED:
            self.remove(name)
        else:
            self.change(name, stage=Stage.DRAINING)

    def change(self, name: str, **fields: object) -> None:
        self.members[name] = replace(self.members[name], **fields)  # type: ignore[arg-type]

    def remove(self, name: str) -> None:
        del self.members[name]
        self.replaced.discard(name)

    def advance(self, name: str) -> None:
        stage = self.members[name].stage
        if stage in NEXT:
            self.change(name, stage=NEXT[stage])
        elif stage is Stage.DRAINING:
            self.remove(name)
        elif stage is Stage.FAILED:
            self.change(name, may_start=True)

    def settle(self) -> list[str]:
        """All steps until the cluster is whole, once nothing else happens any more."""
        taken: list[str] = []
        num_rounds = ROUNDS_PER_MEMBER * (len(self.members) + self.wanted + 2)
        while not self.is_whole:
            assert num_rounds, (self.wanted, self.members)
            num_rounds -= 1
            # The second look finds the steps of the first under way.
            for step in chain.from_iterable(self.steps() for _ in range(2)):
                self.take(step)
                sign = "+" if isinstance(step, Start) else "-"
                taken.append(f"{sign}{step.name.rpartition('-')[2]}")
            for name in list(self.members):
                self.advance(name)
        assert self.steps() == []
        return taken


class ClusterMachine(RuleBasedStateMachine):
    """Operators, deaths and time in any order, and a look at the cluster between them."""

    def __init__(self) -> None:
        super().__init__()
        self.cluster = Cluster(0, "surge", "decode")

    @initialize(
        wanted=st.integers(0, MAX_REPLICAS),
        rolling=st.sampled_from(["surge", "drain_first"]),
        role=st.sampled_from(ROLES),
        there=st.sets(st.integers(0, 2 * MAX_REPLICAS), max_size=MAX_REPLICAS + 1),
    )
    def begin(self, wanted: int, rolling: Rolling, role: Role, there: set[int]) -> None:
        self.cluster = Cluster(wanted, rolling, role)
        for index in sorted(there):
            name = f"{role}-{index}"
            self.cluster.members[name] = Seen(name, role, Stage.SERVING)

    def any_of(self, data: st.DataObject, *stages: Stage) -> str | None:
        names = sorted(
            it.name for it in self.cluster.members.values() if it.stage in stages or not stages
        )
        return data.draw(st.sampled_from(names)) if names else None

    @rule()
    def look(self) -> None:
        cluster = self.cluster
        serving, alive = cluster.num_serving, cluster.num_alive
        is_rolling = any(not it.is_current for it in cluster.staying)
        is_surge = cluster.rolling == "surge"
        steps = cluster.steps()
        assert len({it.name for it in steps}) == len(steps)
        for step in steps:
            cluster.take(step)
        num_spared = is_rolling and not is_surge
        assert cluster.num_serving >= min(serving, cluster.wanted - num_spared)
        assert cluster.num_alive <= max(alive, cluster.wanted + is_surge)
        # Fewer wanted members are fewer at once, also where a new one cannot come to serve.
        assert len(cluster.staying) <= cluster.wanted + (is_rolling and is_surge)

    @precondition(lambda self: self.cluster.members)
    @rule(data=st.data())
    def time_passes(self, data: st.DataObject) -> None:
        if name := self.any_of(data):
            self.cluster.advance(name)

    @rule()
    def all_go_on(self) -> None:
        self.look()
        for name in list(self.cluster.members):
            self.cluster.advance(name)
        self.look()

    @precondition(lambda self: self.cluster.members)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        if name := self.any_of(data):
            if self.cluster.members[name].stage is Stage.DRAINING:
                self.cluster.remove(name)
            else:
                self.cluster.change(name, stage=Stage.FAILED, may_start=False)

    @rule(data=st.data(), num_busy=st.integers(0, 3))
    def work(self, data: st.DataObject, num_busy: int) -> None:
        if name := self.any_of(data, Stage.SERVING):
            self.cluster.change(name, num_busy=num_busy)

    @rule(data=st.data())
    def stumble(self, data: st.DataObject) -> None:
        """A canary of one proxy fails."""
        if name := self.any_of(data, Stage.SERVING):
            self.cluster.change(name, stage=Stage.WARMING)

    @rule(wanted=st.integers(0, MAX_REPLICAS))
    def scale(self, wanted: int) -> None:
        if wanted < self.cluster.wanted:
            self.cluster.replaced.clear()
        self.cluster.wanted = wanted

    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        name = self.any_of(data, *(set(Stage) - {Stage.DRAINING}))
        if name and self.cluster.wanted:
            self.scale(self.cluster.wanted - 1)
            self.cluster.drain(name)

    @rule()
    def apply(self) -> None:
        for name in self.cluster.members:
            self.cluster.change(name, is_current=False)

    @rule(data=st.data())
    def restart(self, data: st.DataObject) -> None:
        if name := self.any_of(data):
            self.cluster.change(name, is_current=False)

    @invariant()
    def one_is_replaced_at_a_time(self) -> None:
        assert len(self.cluster.replaced) <= 1

    @invariant()
    def a_whole_cluster_stays_as_it_is(self) -> None:
        if self.cluster.is_whole:
            assert self.cluster.steps() == []

    def teardown(self) -> None:
        self.cluster.settle()


EVERYDAY = settings(max_examples=150, stateful_step_count=40)
MANY = settings(max_examples=1500, stateful_step_count=60, derandomize=False)


def test_enough_members_serve_whatever_happens() -> None:
    run_machine(ClusterMachine, settings=EVERYDAY)


@pytest.mark.long
def test_enough_members_serve_whatever_happens_in_other_runs() -> None:
    run_machine(ClusterMachine, settings=MANY)


@pytest.mark.parametrize(
    ("rolling", "expected"),
    [
        ("surge", "+0 +1 / +2 -1 +1 -0"),
        ("drain_first", "+0 +1 / -1 +1 -0 +0"),
    ],
)
def test_members_are_replaced_one_after_the_other(rolling: Rolling, expected: str) -> None:
    cluster = Cluster(2, rolling, "prefill")
    started = cluster.settle()
    for name in cluster.members:
        cluster.change(name, is_current=False)
    assert f"{' '.join(started)} / {' '.join(cluster.settle())}" == expected


def test_members_that_serve_or_hold_for_others_leave_last() -> None:
    cluster = Cluster(5, "drain_first", "decode")
    cluster.settle()
    cluster.change("decode-0", stage=Stage.WARMING, num_busy=9)
    cluster.change("decode-1", is_current=False, num_busy=9)
    cluster.change("decode-2", num_busy=1)
    cluster.wanted = 1
    # Of equals the highest number.
    assert cluster.steps() == [Drain(f"decode-{index}") for index in (0, 1, 4, 3)]


@pytest.mark.parametrize(("num_draining", "num_new"), [(0, 2), (1, 1), (2, 0), (3, 0)])
def test_without_room_for_one_more_a_new_one_waits(num_draining: int, num_new: int) -> None:
    cluster = Cluster(4, "drain_first", "decode")
    for index in range(5, 7 + num_draining):
        name = f"decode-{index}"
        stage = Stage.SERVING if index < 7 else Stage.DRAINING
        cluster.members[name] = Seen(name, "decode", stage)
    assert cluster.steps() == [Start(f"decode-{index}") for index in range(num_new)]


@pytest.mark.parametrize(
    ("wanted", "is_current", "may_start", "expected"),
    [
        (2, True, False, []),
        (2, True, True, [Start("decode-1")]),
        (2, False, True, [Drain("decode-1"), Start("decode-2")]),
        (1, True, True, [Drain("decode-1")]),
        (1, False, False, [Drain("decode-1")]),
    ],
)
def test_one_that_failed_comes_back_while_it_is_wanted_as_it_was(
    wanted: int, is_current: bool, may_start: bool, expected: list[Step]
) -> None:
    cluster = Cluster(2, "surge", "decode")
    cluster.settle()
    cluster.wanted = wanted
    cluster.change("decode-1", stage=Stage.FAILED, is_current=is_current, may_start=may_start)
    assert cluster.steps() == expected


def test_each_role_takes_its_own_steps() -> None:
    config = ClusterConfig(model="m")
    there = [Seen("prefill-0", "prefill", Stage.SERVING, is_current=False)]
    assert {it.name for it in next_steps(config, there)} == {"proxy-0", "decode-0", "prefill-1"}
