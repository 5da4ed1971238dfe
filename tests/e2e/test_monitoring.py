"""The dashboard and the alerts of deploy/monitoring ask for metrics and labels that exist."""

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.config import ProxyConfig
from serving.config import KVEventsConfig, KVTransferConfig
from tests.source_tree import ROOT
from tests.support.api.node_double import client_of, fetch, running_proxy, until_status, until_used
from tests.support.nodes.cluster import Cluster, generate, sample
from tests.support.nodes.pairs import GREEDY, prompt_of, request_of

FOLDER = ROOT / "deploy" / "monitoring"
NAME = re.compile(r"\b(?:vllm:|tandem[:_]|process_)[a-z0-9_]+")
SELECTOR = re.compile(r"([a-z0-9_:]+)\{([^}]*)\}")
LABEL = re.compile(r"([a-z_]+)\s*[=!]")
# Those of vLLM's own dashboards that no other test asks for, with the ending of their type.
VLLM_NAMES = {
    "vllm:prompt_tokens_cached_total",
    *(
        f"vllm:{name}_bucket"
        for name in (
            "iteration_tokens_total",
            "request_max_num_generation_tokens",
            "request_params_max_tokens",
            "request_params_n",
            "request_time_per_output_token_seconds",
        )
    ),
}
# What Prometheus itself adds to every sample.
SCRAPED = {"job", "instance"}


def dashboard() -> Iterator[tuple[str, str]]:
    """Expression and legend of every target."""
    board = json.loads((FOLDER / "grafana_dashboard.json").read_text())
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"], target["legendFormat"]


def alerts() -> list[dict[str, Any]]:
    groups = msgspec.yaml.decode((FOLDER / "alerts.yaml").read_bytes())["groups"]
    return [rule for group in groups for rule in group["rules"]]


async def labels_by_metric(urls: list[str]) -> dict[str, set[str]]:
    """The labels of each metric that some server exposes; an empty set before its first sample."""
    found: dict[str, set[str]] = {}
    for url in urls:
        for family in text_string_to_metric_families((await fetch(f"{url}/metrics"))[1]):
            suffixes = ("_total",) if family.type == "counter" else ("", "_bucket", "_sum")
            for suffix in suffixes:
                found.setdefault(family.name + suffix, set())
            for one in family.samples:
                found.setdefault(one.name, set()).update(one.labels)
    return found


@pytest.fixture
async def known(cluster: Cluster, model: Path, tmp_path: Path) -> dict[str, set[str]]:
    """Metrics and labels of a real P, a real D with tiers, and a proxy, after one request."""
    children = [
        {"kv_connector": "PdConnector"},
        {
            "kv_connector": "OffloadConnector",
            "kv_connector_extra_config": {
                "host_bytes": 1 << 20,
                "disk_path": str(tmp_path),
                "disk_bytes": 1 << 24,
            },
        },
    ]
    tiers = msgspec.convert(
        {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": children},
        },
        KVTransferConfig,
    )
    p, d = await cluster.pair(
        model,
        served_model_name=("tiny",),
        enable_prefix_caching=True,
        kv_transfer_config=tiers,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True),
    )
    config = ProxyConfig(prefill=(p.url,), decode=(d.url,), port=0)
    async with running_proxy(config) as base, client_of(base) as client:
        await until_status(f"{base}/ready", 200)
        await until_used(base, 2)
        await client.completions.create(model="tiny", prompt="one two three " * 9, max_tokens=3)
        return await labels_by_metric([base, p.url, d.url])


def check(expression: str, known: dict[str, set[str]]) -> None:
    """Every metric exists, and so do the labels that are asked of it and kept of it."""
    names = NAME.findall(expression)
    assert names or expression.startswith("up{"), expression
    for name in names:
        assert name in known, f"nobody exposes {name}: {expression}"
    kept = {
        label.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for label in by.split(",")
    }
    asked = {
        (name, label)
        for name, text in SELECTOR.findall(expression)
        for label in LABEL.findall(text)
    }
    asked |= {(name, label) for name in names for label in kept}
    for name, label in asked:
        has = known.get(name) or {label}
        # A quantile sums buckets, whose other samples have no `le`.
        assert label in has | SCRAPED | {"le"}, f"{name} has no label {label}: {expression}"


async def test_every_expression_asks_for_what_servers_tell(known: dict[str, set[str]]) -> None:
    targets = list(dashboard())
    assert len(targets) > 40
    for expression, legend in targets:
        check(expression.replace("[$__rate_interval]", "[1m]"), known)
        shown = set(re.findall(r"{{(\w+)}}", legend))
        (name, *_) = NAME.findall(expression)
        assert shown <= (known[name] or shown) | SCRAPED, (expression, legend)
    for rule in alerts():
        check(rule["expr"], known)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description"}, rule["alert"]


async def test_process_and_role_are_told_by_every_server(known: dict[str, set[str]]) -> None:
    assert "process_resident_memory_bytes" in known
    assert known["vllm:e2e_request_latency_seconds_count"] >= {"model_name", "role", "engine"}
    assert known.keys() >= VLLM_NAMES
    assert not any("engine_id" in labels for labels in known.values())


async def test_the_time_in_the_queue_is_that_before_the_first_blocks(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    node = await cluster.start("decode", checkpoints["qwen3"], max_num_seqs=1)
    long = msgspec.structs.replace(GREEDY, max_tokens=100)
    await asyncio.gather(*(generate(node, request_of(prompt_of(40), long)) for _ in range(2)))
    waited = sample(node, "vllm:request_queue_time_seconds_sum")
    assert sample(node, "vllm:request_queue_time_seconds_count") == 2
    assert sample(node, "vllm:request_prefill_time_seconds_count") == 2
    assert sample(node, "vllm:request_inference_time_seconds_count") == 2
    # The second one waits for the whole of the first.
    decoded = sample(node, "vllm:request_decode_time_seconds_sum")
    assert 0.3 * decoded < waited < decoded + sample(node, "vllm:request_prefill_time_seconds_sum")


async def test_a_restarted_node_goes_on_in_the_same_series(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    lives = []
    for _ in range(2):
        node = await cluster.start("decode", checkpoints["qwen3"])
        async with aiohttp.ClientSession() as session, session.get(f"{node.url}/metrics") as reply:
            text = await reply.text()
        lives.append({line.rpartition(" ")[0] for line in text.splitlines() if line[0] != "#"})
        await node.close()
        cluster.nodes.remove(node)
    assert lives[0] == lives[1]
