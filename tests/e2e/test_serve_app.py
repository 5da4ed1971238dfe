"""A cluster as an application of Ray Serve: in another namespace, and in Serve itself."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from tests.support.nodes.processes import free_port

ROOT = Path(__file__).parents[2]
DRIVER_S = 150.0
HAS_SERVE = importlib.util.find_spec("fastapi") is not None  # all of ray[serve] or nothing
CLUSTER = """
name: served
config: {kv_cache_memory_bytes: 16777216, served_model_name: [tiny]}
proxy: {config: {port: 0}}
"""
START = """
import asyncio, json, os, subprocess, sys, urllib.request
from deploy.session import new_session

def main(file, session):
    os.environ.update(session.environment())
    import ray
    from ray.util.placement_group import placement_group_table
    from deploy.serve_app import TandemCluster, app
    from engine.errors import UnavailableError
    ray.init(
        address="local", namespace="another", include_dashboard=False, log_to_driver=False,
        num_cpus=4, object_store_memory=80 << 20, _temp_dir=str(session.ray_folder),
    )
    address = ray.get_runtime_context().gcs_address

    def deploy(command):
        start = [sys.executable, "-m", "deploy", command, "--address", address]
        return subprocess.run(start, stdout=subprocess.PIPE, text=True)
"""
END = """
    print(json.dumps(told))
    ray.shutdown()

with new_session() as session:
    main(sys.argv[1], session)
"""
PLAIN = """
    first = TandemCluster(file)
    told = {"first": asyncio.run(first(None))}
    again = TandemCluster(file)
    asyncio.run(again.check_health())
    told["again"] = asyncio.run(again(None))
    told["codes"] = [deploy(it).returncode for it in ("status", "down", "status")]
    try:
        asyncio.run(again.check_health())
    except UnavailableError as error:
        told["sick"] = str(error)
    groups = [it["state"] for it in placement_group_table().values()]
    told["left"] = [*ray.util.list_named_actors(all_namespaces=True), *groups]
"""
SERVED = """
    from ray import serve
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[2])})
    serve.run(app({"file": file}), name="served")
    url = f"http://127.0.0.1:{sys.argv[2]}/"
    told = {"first": json.load(urllib.request.urlopen(url))}
    serve.delete("served")
    told["codes"] = [deploy(it).returncode for it in ("status", "down")]
    serve.shutdown()
"""
WHOLE = {"prefill": 1, "decode": 1, "proxy": 1}


def drive(model: Path, folder: Path, steps: str, *arguments: str) -> dict[str, Any]:
    file = folder / "cluster.yaml"
    file.write_text(f"model: {model}{CLUSTER}")
    done = subprocess.run(
        [sys.executable, "-c", START + steps + END, str(file), *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=DRIVER_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.long
def test_what_serve_makes_applies_a_cluster_that_commands_find(model: Path, tmp_path: Path) -> None:
    """Serve's namespace is its own, and it makes the object anew whenever it was lost."""
    told = drive(model, tmp_path, PLAIN)
    assert told["first"]["is_whole"] and told["first"]["serving"] == WHOLE
    assert told["first"]["proxies"][0].startswith("http://127.0.0.1:")
    assert told["again"] == told["first"]
    assert told["codes"] == [0, 0, 3]
    assert told["sick"] == "no proxy of cluster served serves"
    assert told["left"] == ["REMOVED"] * 3


@pytest.mark.long
@pytest.mark.skipif(not HAS_SERVE, reason="ray[serve] is not installed")
def test_serve_runs_it_and_the_cluster_outlives_it(model: Path, tmp_path: Path) -> None:

    told = drive(model, tmp_path, SERVED, str(free_port()))
    assert told["first"]["is_whole"] and told["first"]["wanted"] == WHOLE
    assert told["codes"] == [0, 0]


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning")
def test_wrong_arguments_and_a_missing_serve_are_named() -> None:
    from deploy.serve_app import app

    with pytest.raises(ConfigError, match="cluster_file: the only argument is file"):
        app({"cluster_file": "cluster.yaml"})
    if not HAS_SERVE:
        with pytest.raises(ConfigError, match="Ray Serve is not installed: pip install"):
            app({})
