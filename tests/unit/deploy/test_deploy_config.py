"""Cluster files, the state file of `up`, and the demo's table: no Ray, no processes."""

import io
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from rich.console import Console

from deploy.config import load_cluster
from deploy.demo.talk import Exchange, choices_of, table_of
from deploy.session import FOLDER_PREFIX, ClusterState, Session, read_state, shown_session
from engine.errors import ConfigError, UnavailableError

OWNER = """
import pathlib, sys, time
from deploy.session import Session, shown_session
with shown_session(pathlib.Path(sys.argv[1]), Session(pathlib.Path("none"))):
    print("up", flush=True)
    time.sleep(60)
"""


def write_cluster(folder: Path, **fields: object) -> Path:
    file = folder / "cluster.yaml"
    file.write_bytes(msgspec.yaml.encode({"model": "m", **fields}))
    return file


def test_a_relative_model_is_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert load_cluster(write_cluster(tmp_path)).node("decode").model == str(tmp_path / "m")


def test_what_is_no_folder_stays_a_hub_name(tmp_path: Path) -> None:
    file = write_cluster(tmp_path, model="Qwen/Qwen3-0.6B")
    assert load_cluster(file).node("decode").model == "Qwen/Qwen3-0.6B"


def test_the_demo_cluster_has_its_model() -> None:
    assert (Path(load_cluster().model) / "model.safetensors").is_file()


def test_nodes_share_the_options_of_the_cluster_and_may_win_over_them(tmp_path: Path) -> None:
    shared = {"prefix_hash_seed": "s", "mamba_checkpoint_share": 0.25}
    own = {"mamba_checkpoint_share": 0.75}
    config = load_cluster(write_cluster(tmp_path, config=shared, decode={"config": own}))
    p, d = config.node("prefill"), config.node("decode")
    assert (p.prefix_hash_seed, d.prefix_hash_seed) == ("s", "s")
    assert (p.mamba_checkpoint_share, d.mamba_checkpoint_share) == (0.25, 0.75)


@pytest.mark.parametrize(
    ("given", "is_published", "topic"),
    [
        ({}, True, ""),
        ({"kv_events_config": {"topic": "kv@pod@model"}}, True, "kv@pod@model"),
        ({"kv_events_config": {"enable_kv_cache_events": False}}, False, ""),
        ({"enable_prefix_caching": False}, False, ""),
        ({"host": "auto"}, False, ""),
        ({"host": "0.0.0.0"}, False, ""),
        ({"host": "auto", "kv_events_config": {"enable_kv_cache_events": True}}, True, ""),
    ],
)
def test_nodes_publish_events_where_nobody_else_reads_them_or_they_are_told_to(
    tmp_path: Path, given: dict[str, object], is_published: bool, topic: str
) -> None:
    own = load_cluster(write_cluster(tmp_path, decode={"config": given}))
    for config in (load_cluster(write_cluster(tmp_path, config=given)), own):
        events = config.node("decode").kv_events_config
        assert (events.is_published, events.topic) == (is_published, topic)
    assert own.node("prefill").kv_events_config.is_published


def test_members_take_together_what_each_takes(tmp_path: Path) -> None:
    file = write_cluster(
        tmp_path,
        prefill={"replicas": 2, "num_cpus": 0.5, "resources": {"big": 1}},
        proxy={"resources": {"edge": 0.25}, "num_cpus": 1},
    )
    assert load_cluster(file).resources() == {"CPU": pytest.approx(2.1), "big": 2, "edge": 0.25}


def test_nodes_and_proxies_share_the_token_of_the_cluster(tmp_path: Path) -> None:
    given = load_cluster(write_cluster(tmp_path, cluster_token="shared"))
    members = (given.node("prefill"), given.node("decode"), given.proxy_config())
    assert {it.cluster_token for it in members} == {"shared"}
    # Without one in the file a cluster gets its own when it starts, once for all its commands.
    assert load_cluster(write_cluster(tmp_path)).cluster_token is None


def test_a_second_cluster_is_refused_and_the_first_still_shown(tmp_path: Path) -> None:
    file, session = tmp_path / "state.json", Session(tmp_path)
    with shown_session(file, session) as tell:
        assert file.stat().st_mode & 0o077 == 0
        with pytest.raises(ConfigError, match="up already"), shown_session(file, session):
            pass
        tell("127.0.0.1:1")
        state = read_state(file)
        assert (state.pid, state.address) == (os.getpid(), "127.0.0.1:1")
        assert state.folder == str(tmp_path)
        assert file.stat().st_mode & 0o077 == 0
    assert not file.exists()
    with pytest.raises(UnavailableError, match="no cluster is up"):
        read_state(file)


def left_behind(file: Path, folder: Path) -> None:
    """Writes what a killed owner leaves: a state file that nobody holds."""
    file.write_bytes(msgspec.json.encode(ClusterState(pid=os.getpid(), folder=str(folder))))


def test_what_a_killed_owner_has_left_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / f"{FOLDER_PREFIX}x"
    folder.mkdir()
    file = tmp_path / "state.json"
    left_behind(file, folder)
    with pytest.raises(UnavailableError, match="is gone"):
        read_state(file)
    assert not file.exists()
    assert not folder.exists()


def test_a_stale_state_deletes_only_folders_of_an_embedded_ray(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    left_behind(file, tmp_path)
    with shown_session(file, Session(tmp_path)):
        assert tmp_path.exists()
        assert read_state(file).pid == os.getpid()


def test_the_state_of_an_owner_that_is_killed_is_stale(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    command = [sys.executable, "-c", OWNER, str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"up\n"
        assert read_state(file).pid == owner.pid
        owner.kill()
    with pytest.raises(UnavailableError, match="is gone"):
        read_state(file)


def test_the_table_fits_eighty_columns() -> None:
    """With four-digit prompts, megabytes of attention and slow tokens."""
    moved = {
        "prefill_cached_tokens": 8192,
        "decode_cached_tokens": 8192,
        "attention_bytes": 9_999_999,
        "state_bytes": 999_999,
        "transfer_ms": 1234.5,
    }
    usage = SimpleNamespace(prompt_tokens=8192, model_extra={"kv_transfer": moved})
    exchange = Exchange("turn 3 of 3", usage=usage, ttft_ms=1234.5, itl_ms=123.45)
    out = io.StringIO()
    Console(file=out, width=80).print(table_of([exchange]))
    cells = ("turn 3 of 3", "9,999,999", "999,999", "1234.5", "123.45")
    assert all(cell in out.getvalue() for cell in cells), out.getvalue()
    assert "…" not in out.getvalue()


def test_choices_fit_eighty_columns_and_name_nodes_as_the_cluster_does() -> None:
    """With four-digit prompts, and a request that D did alone; the URLs are unknown to users."""
    names = {"grpc://127.0.0.1:1": "prefill-7", "grpc://127.0.0.1:2": "decode-7"}
    hits = {"prefill_hit_tokens": 8176, "decode_hit_tokens": 8160}
    whole = {"prefill": "grpc://127.0.0.1:1", "decode": "grpc://127.0.0.1:2", **hits}
    moved = {"prefill_cached_tokens": 8191, "decode_cached_tokens": 8161}
    usages = [
        {"routing": {**whole, "reason": "prefix"}, "kv_transfer": moved},
        {"routing": {**whole, "prefill": None, "reason": "below_threshold"}},
    ]
    exchanges = [Exchange("turn", usage=SimpleNamespace(model_extra=each)) for each in usages]
    out = io.StringIO()
    Console(file=out, width=80).print(choices_of(exchanges, names))
    rows = [line.split() for line in out.getvalue().splitlines() if line.startswith(" turn")]
    assert rows == [
        ["turn", "prefill-7", "decode-7", "prefix", "8176", "8191", "8160", "8161"],
        ["turn", "-", "decode-7", "below_threshold", "8176", "-", "8160", "-"],
    ]


@pytest.mark.parametrize(
    "text",
    [
        "prefill: {num_gpus: .inf}",
        "prefill: {num_cpus: .nan}",
        "prefill: {autoscaling: {max_replicas: 3, per_decode: .inf}}",
        "decode: {autoscaling: {max_replicas: 3, max_kv_cache_usage: 1.0e-320}}",
    ],
)
def test_no_number_is_infinite_or_nearly_nothing(tmp_path: Path, text: str) -> None:
    """A controller would stumble over it at every look."""
    file = tmp_path / "cluster.yaml"
    file.write_text(f"model: m\n{text}\n")
    with pytest.raises(ConfigError, match=r"cluster\.yaml:2: "):
        load_cluster(file)
