"""Run by test_ray_cluster.py in a process of its own: Ray reads its environment once per process.

Three raylets on this machine with addresses of their own, and one slot each for P, D and the proxy;
the third has two GPUs, in name. The report is the last line.
"""

import asyncio
import importlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import openai
import psutil

from deploy.config import ClusterConfig, DecodeGroup, PrefillGroup, ProxyGroup
from deploy.process import wait_gone
from deploy.session import Session, new_session
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.footprints import watched

if TYPE_CHECKING:
    from deploy.actors import Told
    from deploy.ray_cluster import Cluster, Clusters

SLOTS = ("p_slot", "d_slot", "x_slot")
OPTIONS = {
    "host": "auto",
    "kv_cache_memory_bytes": 16 << 20,
    "max_num_batched_tokens": 64,
    "served_model_name": ["tiny"],
    "enable_prefix_caching": False,  # every request has to be pulled
}
PROMPT = list(range(5, 105))
BACK_S = 150.0


class Report(msgspec.Struct, frozen=True):
    """The facts that the test asserts."""

    machines: dict[str, str]
    through_proxy: list[int]
    by_one_node: list[int]
    pulled_bytes: int
    own_environment: bool
    niceness: set[int]
    after_engine_death: list[int]
    same_engine: bool
    log_of_engine: str
    racing: list[str]
    names: list[str]
    of_other: list[str]
    gpus: list[str]
    through_other: list[int]
    lives: list[list[str]]
    drained_role: str
    too_much: str
    wrong_label: str
    wrong_option: str
    wrong_token: str
    unknown_there: str
    left: list[str]
    opened: list[str]


def main(model: str) -> None:
    with new_session() as session:
        os.environ.update(session.environment())
        report = _run(model, session)
    print(msgspec.json.encode(report).decode())


def _run(model: str, session: Session) -> Report:
    from ray.cluster_utils import Cluster

    raylets = Cluster()
    try:
        for number, slot in enumerate(SLOTS):
            own: dict[str, Any] = {} if number else {"include_dashboard": False}
            raylets.add_node(
                num_cpus=2,
                num_gpus=2 if slot == "x_slot" else 0,
                resources={slot: 1},
                labels={"zone": slot[0]},
                node_ip_address=f"127.0.0.{number + 1}",
                object_store_memory=80 << 20,
                temp_dir=str(session.ray_folder),
                **own,
            )
        return _deploy(model, raylets.address)
    finally:
        raylets.shutdown()


def config_of(model: str, **changes: Any) -> ClusterConfig:
    """P, D and the proxy, each in its slot."""
    given: dict[str, Any] = {
        "name": "three",
        "model": model,
        "runtime_env": {"env_vars": {"ONLY_FOR_MEMBERS": "1"}},
        "config": OPTIONS,
        "prefill": PrefillGroup(resources={"p_slot": 1}),
        "decode": DecodeGroup(resources={"d_slot": 1}),
        "proxy": ProxyGroup(
            resources={"x_slot": 1},
            config={"host": "auto", "port": 0, "enable_prompt_tokens_details": True},
        ),
    }
    return ClusterConfig(**{**given, **changes})


def _deploy(model: str, address: str) -> Report:
    from deploy.ray_cluster import Clusters, connected

    intruder = _status_with_wrong_token(address)
    with connected(address) as thread:
        clusters = Clusters(thread)
        cluster = clusters.named("three")
        with watched() as footprints, footprints.on() as opened:
            cluster.apply(config_of(model), cluster.status())
            cluster.wait_until_whole(_say)
        told = _told(cluster)
        seen = _use(cluster, told)
        other = _other_cluster(clusters, model)
        wrong = _wrong_ones(clusters, model)
        processes = [psutil.Process(it.pid) for it in _told(cluster).values()]
        unknown = _error_of(_start_what_workers_lack)
        for name in clusters.names():
            clusters.named(name).stop(_say)
        left = [str(each) for each in wait_gone(processes, 1.0)]
        left += thread.call("look for actors", BACK_S, _actors)
    _, said = intruder.communicate(timeout=BACK_S)
    return Report(
        machines={name: it.node_ip for name, it in told.items()},
        wrong_token=f"{intruder.returncode} {said}",
        unknown_there=unknown,
        left=left,
        opened=sorted(opened),
        **seen,
        **other,
        **wrong,
    )


def _told(cluster: "Cluster") -> dict[str, "Told"]:
    return {it.name: it.told for it in cluster.status().members if it.told is not None}


def _use(cluster: "Cluster", told: dict[str, "Told"]) -> dict[str, Any]:
    proxy = told["proxy-0"]
    through_proxy, pulled = complete(proxy.url)
    return {
        "through_proxy": through_proxy,
        "by_one_node": complete(told["prefill-0"].url)[0],
        "pulled_bytes": pulled,
        "own_environment": b"ONLY_FOR_MEMBERS=1" in Path(f"/proc/{proxy.pid}/environ").read_bytes(),
        "niceness": {psutil.Process(it.pid).nice() for it in told.values()},
        **_engine_death(cluster, told["decode-0"], proxy),
    }


def _engine_death(cluster: "Cluster", decode: "Told", proxy: "Told") -> dict[str, Any]:
    """D's engine dies: another life begins, and the proxy uses it. Its log has both."""
    import ray

    ray.get_actor("three/decode-0.1", "tandem").__ray_call__.remote(_break_engine)
    deadline = time.monotonic() + BACK_S
    while cluster.status().members[1].life == 1:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    cluster.wait_until_whole(_say)
    return {
        "after_engine_death": complete(proxy.url)[0],
        "same_engine": _told(cluster)["decode-0"].engine_id == decode.engine_id,
        "log_of_engine": cluster.read_log("decode-0", 1000),
    }


def _other_cluster(clusters: "Clusters", model: str) -> dict[str, Any]:
    """Two commands apply another cluster at once: decode nodes with a GPU each, two proxies."""
    other = clusters.named("other")
    config = config_of(
        model,
        name="other",
        prefill=PrefillGroup(replicas=0),
        decode=DecodeGroup(
            replicas=2, num_gpus=1, config={"device": "cpu"}, rolling_update="drain_first"
        ),
        proxy=ProxyGroup(replicas=2, strategy="STRICT_SPREAD", config={"host": "auto", "port": 0}),
    )
    before = other.status()
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(_error_of, lambda: other.apply(config, before)) for _ in range(2)]
        racing = sorted(each.result() for each in both)
    other.wait_until_whole(_say)
    told = _told(other)
    return {
        "racing": racing,
        "names": clusters.names(),
        "of_other": sorted(f"{name} {it.node_ip}" for name, it in told.items()),
        "gpus": [told[f"decode-{it}"].gpus[0] for it in range(2)],
        "through_other": complete(told["proxy-1"].url)[0],
        **_operate(other),
    }


def _operate(other: "Cluster") -> dict[str, Any]:
    """A decode node leaves, comes back, and is replaced; `lives`: that serve after each."""
    lives = []
    for act in (
        lambda: other.drain("decode-0"),
        lambda: other.scale("decode", 2),
        lambda: other.restart(["decode-1"]),
    ):
        act()
        other.wait_until_whole(_say)
        members = other.status().members
        lives.append([f"{it.name} {it.life}" for it in members if it.role == "decode"])
    return {"lives": lives, "drained_role": _error_of(lambda: other.drain("decode"))}


def _wrong_ones(clusters: "Clusters", model: str) -> dict[str, Any]:
    """Clusters that cannot be: what is said, and they are stopped again."""
    none = clusters.named("none")
    gpus = config_of(model, name="none", decode=DecodeGroup(num_gpus=8, config={"device": "cpu"}))
    label = config_of(model, name="none", decode=DecodeGroup(labels={"zone": "q"}))
    small = config_of(
        model,
        name="none",
        config={**OPTIONS, "kv_cache_memory_bytes": 1000},
        prefill=PrefillGroup(),
        decode=DecodeGroup(),
        proxy=ProxyGroup(config={"port": 0}),
    )
    none.apply(small, none.status())
    wrong_option = _error_of(lambda: none.wait_until_whole(_say))
    none.stop(_say)
    return {
        "too_much": "; ".join(it.problem for it in none.plan(gpus)),
        "wrong_label": "; ".join(it.problem for it in none.plan(label)),
        "wrong_option": wrong_option,
    }


def _actors() -> list[str]:
    from deploy.member import actor_names

    return actor_names()


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

    from deploy.member import why

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "only_here.py").write_text("class Actor:\n    def start(self): ...\n")
        sys.path.append(folder)
        kind = importlib.import_module("only_here").Actor
        sys.path.remove(folder)
    actor = ray.remote(kind).options(num_cpus=0).remote()
    try:
        ray.get(actor.start.remote(), timeout=BACK_S)
    except ray.exceptions.RayError as error:
        raise AssertionError(why(error)) from error


def _break_engine(actor: Any) -> None:
    """In the actor's process."""
    loop = actor._thread._loop
    asyncio.run_coroutine_threadsafe(run_in_engine(actor._node.engine, _raise), loop)


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
