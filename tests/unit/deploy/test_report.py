"""Clusters as text for operators: changes without secrets, members beside what is wanted."""

import io

import msgspec
import pytest
from rich.console import Console

from deploy.actors import Birth, Told
from deploy.config import ClusterConfig, DecodeGroup, DecodeScaling, PrefillGroup, ProxyGroup
from deploy.controller import ClusterStatus, MemberStatus
from deploy.placement import Machine, Planned
from deploy.reconcile import Stage
from deploy.report import changes, placement_table, status_table, urls_of_proxies

OLD = ClusterConfig(
    model="m",
    cluster_token="hush-1",
    config={"drain_timeout": 5, "api_key": "hush-2"},
    proxy=ProxyGroup(config={"api_key": "hush-3"}),
    runtime_env={"env_vars": {"HF_TOKEN": "hush-4"}},
)


def changed(**fields: object) -> list[str]:
    return list(changes(OLD, msgspec.structs.replace(OLD, **fields)))


def test_a_first_cluster_is_told_by_its_members() -> None:
    config = msgspec.structs.replace(OLD, prefill=PrefillGroup(replicas=3))
    assert list(changes(None, config)) == ["+ cluster tandem: prefill 3, decode 1, proxy 1"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ["nothing changes"]),
        ({"config": {"api_key": "hush-2", "drain_timeout": 5.0}}, ["nothing changes"]),
        ({"decode": DecodeGroup(labels={})}, ["nothing changes"]),
        # A file that leaves the token to the cluster keeps it.
        ({"cluster_token": None}, ["nothing changes"]),
        ({"cluster_token": "hush-5"}, ["~ cluster_token: *** -> ***"]),
        ({"proxy": ProxyGroup()}, ["~ proxy.config.api_key: *** -> ***"]),
        ({"config": {}}, ["~ config.api_key: *** -> ***", "~ config.drain_timeout: 5 -> None"]),
        (
            {"runtime_env": {"env_vars": {"HF_TOKEN": "hush-6"}}},
            ["~ runtime_env.env_vars.HF_TOKEN: *** -> ***"],
        ),
        (
            {"decode": DecodeGroup(replicas=2, labels={"zone": "a"})},
            ["~ decode.labels.zone: None -> a", "~ decode.replicas: 1 -> 2"],
        ),
        (
            {"decode": DecodeGroup(autoscaling=DecodeScaling(max_replicas=7))},
            [
                "~ decode.autoscaling.downscale_delay_s: None -> 300.0",
                "~ decode.autoscaling.max_kv_cache_usage: None -> 0.85",
                "~ decode.autoscaling.max_replicas: None -> 7",
                "~ decode.autoscaling.min_replicas: None -> 1",
                "~ decode.autoscaling.target_ongoing_requests: None -> 32",
                "~ decode.autoscaling.upscale_delay_s: None -> 10.0",
            ],
        ),
    ],
)
def test_changes_name_keys_and_hide_secrets(fields: dict[str, object], expected: list[str]) -> None:
    assert changed(**fields) == expected


def member(
    name: str, stage: Stage, *, is_current: bool = True, problem: str = "", is_told: bool = True
) -> MemberStatus:
    role = name.partition("-")[0]
    birth = Birth(cluster="tandem", name=name, role="decode", life=1, digest="", desired=b"")
    told = Told(
        birth=birth,
        phase="running",
        url=f"http://10.0.0.1/{name}",
        engine_id=f"engine-{name}",
        node_id="0123456789",
        gpus=("4", "5"),
    )
    fields = {
        "name": name,
        "role": role,
        "stage": stage,
        "is_current": is_current,
        "life": 3,
        "problem": problem,
        "is_wrong_option": False,
        "told": msgspec.to_builtins(told) if is_told else None,
    }
    return msgspec.convert(fields, MemberStatus)


def shown(table: object) -> list[list[str]]:
    """Cells of each line; those without text are not there."""
    out = io.StringIO()
    Console(file=out, width=160).print(table)
    return [line.split() for line in out.getvalue().splitlines() if line.strip()]


def test_members_stand_beside_what_is_wanted() -> None:
    members = (
        member("prefill-0", Stage.FAILED, problem="no-room", is_told=False),
        member("decode-0", Stage.SERVING),
        member("decode-1", Stage.SERVING, is_current=False),
        member("proxy-0", Stage.WARMING),
    )
    config = msgspec.structs.replace(OLD, decode=DecodeGroup(replicas=2))
    status = ClusterStatus(generation=7, config=config, members=members)
    title, _, _, *rows = shown(status_table(status))
    assert " ".join(title) == (
        "cluster tandem, generation 7: prefill 0 of 1, decode 1 of 2, proxy 0 of 1"
    )
    place = ["01234567", "4,5", "3"]
    assert rows == [
        ["prefill-0", "failed", "-", "-", "-", "3", "no-room"],
        ["decode-0", "serving", "http://10.0.0.1/decode-0", "engine-decode-0", *place],
        ["decode-1", "serving,", "outdated", "http://10.0.0.1/decode-1", "engine-decode-1", *place],
        ["proxy-0", "warming", "http://10.0.0.1/proxy-0", "engine-proxy-0", *place],
        ["clients", "ask", "http://10.0.0.1/proxy-0/v1"],
    ]
    assert urls_of_proxies(status) == ["http://10.0.0.1/proxy-0"]


def test_no_cluster_has_no_members_and_no_url() -> None:
    assert shown(status_table(ClusterStatus())) == [["no", "cluster"]]
    assert urls_of_proxies(ClusterStatus()) == []
    assert not ClusterStatus().is_whole


@pytest.mark.parametrize(
    ("stage", "is_current", "num_more", "is_whole"),
    [
        (Stage.SERVING, True, 0, True),
        (Stage.SERVING, False, 0, False),
        (Stage.WARMING, True, 0, False),
        (Stage.SERVING, True, 1, False),
    ],
)
def test_a_cluster_is_whole_with_what_is_wanted_and_nothing_else(
    stage: Stage, is_current: bool, num_more: int, is_whole: bool
) -> None:
    members = (
        member("prefill-0", Stage.SERVING),
        member("decode-0", stage, is_current=is_current),
        member("proxy-0", Stage.SERVING),
        *(member(f"decode-{1 + index}", Stage.DRAINING) for index in range(num_more)),
    )
    assert ClusterStatus(config=OLD, members=members).is_whole is is_whole


def test_planned_members_show_their_machine_or_why_there_is_none() -> None:
    machine = Machine("0123456789", "10.0.0.1", {})
    planned = [
        Planned("decode-0", "decode", machine),
        Planned("decode-1", "decode", None, "no-room"),
    ]
    assert shown(placement_table(planned))[2:] == [
        ["decode-0", "10.0.0.1", "01234567"],
        ["decode-1", "-", "-", "no-room"],
    ]
