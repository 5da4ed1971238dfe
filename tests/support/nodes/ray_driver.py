"""Run by test_ray_cluster.py in a process of its own: Ray reads its environment once per process.

Three raylets on this machine, one slot each for P, D and the proxy. The report is the last line.
"""

import asyncio
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import psutil

from deploy.config import ClusterConfig, NodeGroup
from deploy.process import wait_gone
from deploy.session import Session, new_session
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.footprints import watched

if TYPE_CHECKING:
    from deploy.actors import Member

SLOTS = ("p_slot", "d_slot", "x_slot")
OPTIONS = {
    "kv_cache_memory_bytes": 16 << 20,
    "max_num_batched_tokens": 64,
    "served_model_name": ["tiny"],
    "enable_prefix_caching": False,  # every request has to be pulled
}
PROMPT = list(range(5, 105))
BACK_S = 150.0


class Report(msgspec.Struct, frozen=True):
    """The facts that the test asserts."""

    kinds: list[str]
    raylets: list[str]
    status: list[str]
    through_proxy: list[int]
    by_one_node: list[int]
    pulled_bytes: int
    after_restart: list[int]
    same_process: bool
    after_engine_death: list[int]
    same_engine: bool
    wrong_token: str
    second_start: str
    unknown_there: str
    own_environment: bool
    left: list[str]
    opened: list[str]


def main(model: str) -> None:
    with new_session() as session:
        os.environ.update(session.environment())
        report = _run(model, session)
    print(msgspec.json.encode(report).decode())


def _run(model: str, session: Session) -> Report:
    from ray.cluster_utils import Cluster

    cluster = Cluster()
    try:
        for number, slot in enumerate(SLOTS):
            own: dict[str, Any] = {} if number else {"include_dashboard": False}
            cluster.add_node(
                num_cpus=1,
                resources={slot: 1},
                object_store_memory=80 << 20,
                temp_dir=str(session.ray_folder),
                **own,
            )
        return _deploy(model, cluster.address, session)
    finally:
        cluster.shutdown()


def _deploy(model: str, address: str, session: Session) -> Report:
    from deploy.ray_cluster import cluster_members, connected, running

    config = ClusterConfig(
        model=model,
        runtime_env={"env_vars": {"ONLY_FOR_MEMBERS": "1"}},
        prefill=NodeGroup(resources={"p_slot": 1}, config=OPTIONS),
        decode=NodeGroup(resources={"d_slot": 1}, config=OPTIONS),
        proxy={"port": 0, "enable_prompt_tokens_details": True, "resources": {"x_slot": 1}},
    )
    with connected(address):
        with watched() as footprints, footprints.on() as opened, running(config, _say) as members:
            seen = _use(config, members, address)
            processes = [psutil.Process(member.pid) for member in cluster_members()]
        left = [str(each) for each in wait_gone(processes, 0.0)]
        left += [member.name for member in cluster_members()]
        return Report(**seen, left=left, opened=sorted(opened))


def _use(config: ClusterConfig, members: list["Member"], address: str) -> dict[str, Any]:
    from deploy.ray_cluster import cluster_members, start_cluster

    prefill, decode, proxy = members
    intruder = _status_with_wrong_token(address)
    through_proxy, pulled = complete(proxy.url)
    report = {
        "kinds": [member.kind for member in members],
        "raylets": [member.node_id for member in members],
        "status": [member.name for member in cluster_members()],
        "through_proxy": through_proxy,
        "by_one_node": complete(prefill.url)[0],
        "pulled_bytes": pulled,
        "own_environment": b"ONLY_FOR_MEMBERS=1" in Path(f"/proc/{proxy.pid}/environ").read_bytes(),
        "unknown_there": _error_of(_start_what_workers_lack),
        "second_start": _error_of(lambda: start_cluster(config, _say)),
        **_restart(prefill, proxy),
        **_engine_death(decode, proxy),
    }
    _, said = intruder.communicate(timeout=BACK_S)
    return {**report, "wrong_token": f"{intruder.returncode} {said}"}


def complete(url: str) -> tuple[list[int], int]:
    """The tokens, and how many bytes D pulled for them."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    answer = client.completions.create(
        model="tiny",
        prompt=PROMPT,
        max_tokens=8,
        temperature=0,
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    assert answer.usage is not None
    assert answer.choices[0].model_extra is not None
    moved = (answer.usage.model_extra or {}).get("kv_transfer") or {}
    pulled = moved.get("attention_bytes", 0) + moved.get("state_bytes", 0)
    return answer.choices[0].model_extra["token_ids"], pulled


def _start_what_workers_lack() -> None:
    """Workers look where the driver could import from when it connected: not in this folder."""
    import ray

    from deploy.ray_cluster import _get

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "only_here.py").write_text("class Actor:\n    def start(self): ...\n")
        sys.path.append(folder)
        kind = importlib.import_module("only_here").Actor
        sys.path.remove(folder)
    actor = ray.remote(kind).options(num_cpus=0).remote()
    _get([actor.start.remote()], BACK_S, "it to start")


def _restart(prefill: "Member", proxy: "Member") -> dict[str, Any]:
    """P is killed, Ray starts it again, and the proxy uses it again: D pulls from it."""
    from deploy.ray_cluster import cluster_members

    os.kill(prefill.pid, signal.SIGKILL)
    deadline = time.monotonic() + BACK_S
    pulled, tokens = 0, list[int]()
    while Path(f"/proc/{prefill.pid}").exists() or not pulled:
        assert time.monotonic() < deadline, cluster_members()
        tokens, pulled = complete(proxy.url)
    (now,) = [member for member in cluster_members() if member.name == prefill.name]
    return {"after_restart": tokens, "same_process": now.engine_id == prefill.engine_id}


def _engine_death(decode: "Member", proxy: "Member") -> dict[str, Any]:
    """D's engine dies: its process ends, Ray starts it again, and the proxy uses it again."""
    import ray

    from deploy.ray_cluster import cluster_members

    ray.get_actor(decode.name).__ray_call__.remote(_break_engine)
    deadline = time.monotonic() + BACK_S
    tokens = list[int]()
    while Path(f"/proc/{decode.pid}").exists() or not tokens:
        assert time.monotonic() < deadline, cluster_members()
        with suppress(openai.APIError):
            tokens, _ = complete(proxy.url)
    (now,) = [member for member in cluster_members() if member.name == decode.name]
    return {"after_engine_death": tokens, "same_engine": now.engine_id == decode.engine_id}


def _break_engine(actor: Any) -> None:
    """In the actor's process."""
    asyncio.run_coroutine_threadsafe(run_in_engine(actor._node.engine, _raise), actor._loop)


def _raise() -> None:
    raise AssertionError("broken on purpose")


def _status_with_wrong_token(address: str) -> subprocess.Popen[str]:
    """Runs beside the rest: Ray tries for ten seconds."""
    environment = {key: os.environ[key] for key in os.environ if key != "RAY_AUTH_TOKEN_PATH"}
    return subprocess.Popen(
        [sys.executable, "-m", "deploy", "status", "--address", address],
        env={**environment, "RAY_AUTH_TOKEN": "ab" * 32},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


def _error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return str(error)
    return ""


def _say(text: str) -> None:
    print(time.strftime("%H:%M:%S"), text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
