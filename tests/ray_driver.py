"""Run by test_ray_cluster.py in a process of its own; prints one JSON report as its last line."""

import sys
import time

import msgspec
import openai
import ray
from ray.cluster_utils import Cluster

from deploy.config import ClusterConfig, NodeGroup
from deploy.ray_cluster import cluster_members, connected, start_cluster, stop_cluster

OPTIONS = {"kv_cache_memory_bytes": 16 << 20, "max_num_batched_tokens": 64}


def main(model: str) -> None:
    cluster = Cluster()
    for name in ("p_slot", "d_slot", "x_slot"):
        cluster.add_node(num_cpus=1, resources={name: 1}, object_store_memory=80 << 20)
    config = ClusterConfig(
        model=model,
        prefill=NodeGroup(resources={"p_slot": 1}, config=OPTIONS),
        decode=NodeGroup(resources={"d_slot": 1}, config=OPTIONS),
        proxy={"port": 0, "resources": {"x_slot": 1}},
    )
    try:
        with connected(cluster.address):
            report = _serve(config, model)
    finally:
        cluster.shutdown()
    print(msgspec.json.encode(report).decode())


def _serve(config: ClusterConfig, model: str) -> dict[str, object]:
    members = start_cluster(config, "test", lambda text: print(text, file=sys.stderr))
    assert {m.pid for m in cluster_members()} == {m.pid for m in members}
    tokens = _complete(members[-1].url, model)
    stop_cluster(lambda text: print(text, file=sys.stderr))
    return {
        "kinds": [m.kind for m in members],
        "node_ids": [m.node_id for m in members],
        "pids": [m.pid for m in members],
        "completion_tokens": tokens,
        "actors_after": ray.util.list_named_actors(),
    }


def _complete(url: str, model: str) -> int:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=30)
    deadline = time.monotonic() + 30
    while True:
        try:
            answer = client.completions.create(
                model=model, prompt=list(range(5, 105)), max_tokens=8,
                temperature=0, extra_body={"ignore_eos": True},
            )  # fmt: skip
        except openai.APIStatusError as error:
            if error.status_code != 503 or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            assert answer.usage is not None
            return answer.usage.completion_tokens


if __name__ == "__main__":
    main(sys.argv[1])
