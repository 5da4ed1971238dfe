"""Machines of members, beside a count of the room that each machine has."""

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deploy.config import ROLES, ClusterConfig, DecodeGroup, Group, Role, Strategy
from deploy.placement import Machine, Planned, check_hosts, check_room, choose, plan, why_none
from engine.errors import ConfigError

TENTHS = st.integers(0, 12)
STRATEGIES: st.SearchStrategy[Strategy] = st.sampled_from(["PACK", "SPREAD", "STRICT_SPREAD"])
LABELS = st.dictionaries(st.sampled_from(["zone", "disk"]), st.sampled_from("ab"))


def machine(number: int, *, cpus: float = 4.0, gpus: float = 0.0, **labels: str) -> Machine:
    total = {"CPU": cpus, "GPU": gpus} if gpus else {"CPU": cpus}
    return Machine(f"id-{number}", f"10.0.0.{number}", total, labels)


@st.composite
def machines_with_members(draw: st.DrawFn) -> list[Machine]:
    """Machines on which other groups have reserved something, also more than there seems to be."""
    found = []
    for number in range(draw(st.integers(0, 4))):
        each = machine(number, cpus=draw(TENTHS) / 10, gpus=draw(st.integers(0, 3)))
        each.labels = draw(LABELS)
        for role in draw(st.lists(st.sampled_from(ROLES), max_size=3)):
            each.add(role, {"CPU": draw(TENTHS) / 10})
        found.append(each)
    return found


@st.composite
def groups(draw: st.DrawFn) -> DecodeGroup:
    return DecodeGroup(
        replicas=draw(st.integers(1, 6)),
        num_cpus=draw(TENTHS) / 10,
        num_gpus=draw(st.sampled_from([0.0, 0.5, 1.0])),
        labels=draw(LABELS),
        strategy=draw(STRATEGIES),
    )


def capacity(each: Machine, group: Group) -> int:
    """Members that there is room for, counted in tenths; those of 0 CPUs are without number."""
    if any(each.labels.get(name) != value for name, value in group.labels.items()):
        return 0
    rooms = [
        (round(10 * each.total.get(name, 0.0)) - round(10 * each.reserved[name]))
        // round(10 * amount)
        for name, amount in group.bundle().items()
        if amount
    ]
    if any(each.reserved[name] > each.total.get(name, 0.0) + 0.01 for name in group.bundle()):
        return 0
    return max(min(rooms, default=group.replicas), 0)


def decode_cluster(group: DecodeGroup) -> ClusterConfig:
    config = ClusterConfig(model="m", decode=group)
    return msgspec.structs.replace(
        config,
        prefill=msgspec.structs.replace(config.prefill, replicas=0),
        proxy=msgspec.structs.replace(config.proxy, replicas=0),
    )


@settings(max_examples=300)
@given(machines_with_members(), groups())
def test_a_member_comes_to_a_machine_with_room_in_the_order_of_the_strategy(
    machines: list[Machine], group: DecodeGroup
) -> None:
    fit = [it for it in machines if capacity(it, group)]
    if group.strategy == "STRICT_SPREAD":
        fit = [it for it in fit if not it.roles["decode"]]
    chosen = choose("decode", group, machines)
    assert {it.node_id for it in chosen} == {it.node_id for it in fit}
    counts = [it.roles["decode"] for it in chosen]
    assert counts == sorted(counts, reverse=group.strategy == "PACK")


@settings(max_examples=300)
@given(machines_with_members(), groups())
def test_as_many_members_are_planned_as_there_is_room_for(
    machines: list[Machine], group: DecodeGroup
) -> None:
    rooms = {it.node_id: capacity(it, group) for it in machines}
    if group.strategy == "STRICT_SPREAD":
        rooms = {it.node_id: min(rooms[it.node_id], not it.roles["decode"]) for it in machines}
    planned = plan(decode_cluster(group), machines, [])
    assert [it.name for it in planned] == [f"decode-{index}" for index in range(group.replicas)]
    placed = Counter(it.machine.node_id for it in planned if it.machine is not None)
    assert placed.total() == min(group.replicas, sum(rooms.values()))
    assert all(number <= rooms[node_id] for node_id, number in placed.items())
    assert all(bool(it.problem) == (it.machine is None) for it in planned)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [("PACK", [0, 0, 0, 0]), ("SPREAD", [0, 1, 2, 0]), ("STRICT_SPREAD", [0, 1, 2, None])],
)
def test_strategies_pack_and_spread(strategy: Strategy, expected: list[int | None]) -> None:
    group = DecodeGroup(replicas=4, strategy=strategy)
    planned = plan(decode_cluster(group), [machine(number) for number in range(3)], [])
    found = [it.machine and int(it.machine.node_id.removeprefix("id-")) for it in planned]
    assert found == expected


def test_of_equal_machines_one_with_few_members_of_any_role_is_chosen() -> None:
    machines = [machine(number) for number in range(2)]
    machines[0].add("prefill", {})
    assert [it.node_id for it in choose("decode", DecodeGroup(), machines)] == ["id-1", "id-0"]
    packed = DecodeGroup(strategy="PACK")
    assert [it.node_id for it in choose("decode", packed, machines)] == ["id-0", "id-1"]


def test_tenths_fill_a_machine_to_the_last() -> None:
    group = DecodeGroup(replicas=11, num_cpus=0.1)
    planned = plan(decode_cluster(group), [machine(0, cpus=1.0)], [])
    assert [it.machine is not None for it in planned] == [True] * 10 + [False]


def test_what_is_there_is_not_planned_again_and_keeps_its_name() -> None:
    group = DecodeGroup(replicas=4)
    planned = plan(decode_cluster(group), [machine(0)], ["decode-1", "decode-4", "prefill-0"])
    assert [it.name for it in planned] == ["decode-0", "decode-2"]


STRICT = "STRICT_SPREAD: each machine with room has a decode member already"
WITH_GPU = DecodeGroup(num_cpus=2.0, num_gpus=1.0)
# One lacks a GPU, the other one two CPUs.
SMALL = [machine(1, cpus=2.0), machine(2, cpus=0.5, gpus=1.0)]


@pytest.mark.parametrize(
    ("group", "machines", "expected"),
    [
        (DecodeGroup(), [], "no machine of this Ray is alive"),
        (
            DecodeGroup(labels={"zone": "b", "disk": "a"}),
            [machine(1, zone="b"), machine(2, zone="b", disk="b")],
            "no machine has the labels zone=b, disk=a",
        ),
        (WITH_GPU, SMALL, "no machine has room for CPU 2, GPU 1; 10.0.0.1 lacks GPU 1"),
        (
            DecodeGroup(num_cpus=2.0, num_gpus=1.0, labels={"zone": "b"}),
            [machine(1, cpus=2.0), machine(2, cpus=0.5, zone="b")],
            "no machine has room for CPU 2, GPU 1; 10.0.0.2 lacks CPU 1.5, GPU 1",
        ),
        (
            DecodeGroup(resources={"nic": 2.0}),
            [machine(1)],
            "no machine has room for CPU 0.1, nic 2; 10.0.0.1 lacks nic 2",
        ),
    ],
)
def test_a_sentence_says_what_lacks(
    group: DecodeGroup, machines: Sequence[Machine], expected: str
) -> None:
    assert choose("decode", group, machines) == []
    assert why_none("decode", group, machines) == expected
    (planned,) = plan(decode_cluster(group), machines, [])
    assert planned.problem == expected


def test_a_machine_of_its_own_for_each_says_so_when_there_are_no_more() -> None:
    group = DecodeGroup(replicas=2, strategy="STRICT_SPREAD")
    planned = plan(decode_cluster(group), [machine(1), machine(2, cpus=0.0)], [])
    assert [it.problem for it in planned] == ["", STRICT]
    check_room(planned[:1])
    with pytest.raises(ConfigError, match=r"^decode-1: STRICT_SPREAD"):
        check_room(planned)
    # Two machines hold members already.
    with pytest.raises(ConfigError, match="come to 2 machines"):
        check_hosts(decode_cluster(group), planned[:1], {"10.0.0.9"})


def planned_on(*numbers: int) -> list[Planned]:
    return [Planned(f"decode-{n}", "decode", machine(n)) for n in numbers]


@pytest.mark.parametrize("role", ROLES)
def test_members_on_several_machines_serve_more_than_loopback(role: Role) -> None:
    groups = {
        each: msgspec.structs.replace(
            ClusterConfig(model="m").group(each),
            config={"host": "localhost"} if each == role else {"host": "auto"},
        )
        for each in ROLES
    }
    config = msgspec.structs.replace(ClusterConfig(model="m", cluster_token="t"), **groups)
    nowhere = Planned("prefill-0", "prefill", None, "no room")
    check_hosts(config, [*planned_on(1, 1), nowhere])
    with pytest.raises(ConfigError, match=f"2 machines, and {role} serves localhost: set host: au"):
        check_hosts(config, planned_on(1, 2))
    gone = msgspec.structs.replace(config.group(role), replicas=0)
    check_hosts(msgspec.structs.replace(config, **{role: gone}), planned_on(1, 2))
