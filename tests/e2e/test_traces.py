"""One OpenTelemetry trace of a request through proxy, P, the pull and D, in a real collector."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.errors import ConfigError
from proxy.config import ProxyConfig
from tests.support.api.collector import Seen, collecting
from tests.support.api.node_double import client_of, running_proxy, until_status, until_used
from tests.support.nodes.cluster import Cluster, transfer_config
from tests.support.nodes.pairs import hand_over, prompt_of

TEXT = "the quick brown fox jumps over the lazy dog " * 3
MS = 1_000_000
PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


@asynccontextmanager
async def traced(cluster: Cluster, model: Path, endpoint: str) -> AsyncIterator[Any]:
    """A client of a proxy, P and D that send their spans to `endpoint`."""
    p, d = await cluster.pair(
        model,
        served_model_name=("tiny",),
        otlp_traces_endpoint=endpoint,
        kv_transfer_config=transfer_config(),
    )
    config = ProxyConfig(prefill=(p.url,), decode=(d.url,), port=0, otlp_traces_endpoint=endpoint)
    async with running_proxy(config) as base, client_of(base) as client:
        await until_status(f"{base}/ready", 200)
        await until_used(base, 2)
        yield client


def is_child(child: Seen, parent: Seen) -> bool:
    same_trace = child.span.trace_id == parent.span.trace_id
    return same_trace and child.span.parent_span_id == parent.span.span_id


async def test_a_request_is_one_trace_from_the_client_to_the_pull(
    cluster: Cluster, model: Path
) -> None:
    async with collecting() as collector:
        async with traced(cluster, model, collector.grpc_url) as client:
            reply = await client.completions.create(
                model="tiny",
                prompt=TEXT,
                max_tokens=5,
                temperature=0.5,
                extra_headers={"traceparent": PARENT, "X-Request-Id": "mine"},
                extra_body={"ignore_eos": True},
            )
        for node in cluster.nodes:
            await node.close()
        cluster.nodes.clear()
    proxy = collector.one("tandem-proxy", "llm_request")
    to_p, to_d = (collector.one("tandem-proxy", kind) for kind in ("prefill", "decode"))
    on_p, on_d = (collector.one(f"tandem-{it}", "llm_request") for it in ("prefill", "decode"))
    pull = collector.one("tandem-decode", "kv_transfer")
    assert len(collector.spans) == 6
    assert proxy.span.trace_id.hex() == PARENT.split("-")[1]
    assert proxy.span.parent_span_id.hex() == PARENT.split("-")[2]
    chain = [(to_p, proxy), (to_d, proxy), (on_p, to_p), (on_d, to_d), (pull, on_d)]
    assert all(is_child(child, parent) for child, parent in chain)
    # The clocks are those of one machine. A node's span ends after its last output has left.
    for child, parent in chain:
        assert parent.span.start_time_unix_nano - MS <= child.span.start_time_unix_nano
    for child, parent in ((to_p, proxy), (to_d, proxy), (pull, on_d)):
        assert child.span.end_time_unix_nano <= parent.span.end_time_unix_nano + MS
    told = proxy.attributes
    assert told["gen_ai.usage.prompt_tokens"] == reply.usage.prompt_tokens
    assert told["gen_ai.usage.completion_tokens"] == 5
    assert (told["gen_ai.request.max_tokens"], told["gen_ai.request.temperature"]) == (5, 0.5)
    assert told["tandem.outcome"] == "length" and told["tandem.x_request_id"] == "mine"
    assert 0 < told["gen_ai.latency.time_to_first_token"] <= told["gen_ai.latency.e2e"]
    queued = on_p.attributes["gen_ai.latency.time_in_queue"]
    assert 0 < queued < on_p.attributes["gen_ai.latency.time_to_first_token"]
    moved = pull.attributes
    assert moved["tandem.kv_transfer.attention_bytes"] > 0 < moved["tandem.kv_transfer.state_bytes"]
    assert moved["tandem.kv_transfer.verified"] is True
    assert b"quick" not in b"".join(collector.raw)


async def test_a_hand_over_that_failed_says_why_in_its_trace(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    """Over HTTP this time: P is of another cluster's kind, so D computes the prompt itself."""
    async with collecting() as collector:
        config = transfer_config("shm")
        p = await cluster.start("prefill", checkpoints["qwen3"], kv_transfer_config=config)
        d = await cluster.start(
            "decode",
            checkpoints["qwen3"],
            kv_transfer_config=transfer_config("zmq"),
            otlp_traces_endpoint=collector.http_url,
        )
        assert not (await hand_over(p, d, prompt_of(40))).last.was_pulled
        await d.close()
        cluster.nodes.remove(d)
        pull = collector.one("tandem-decode", "kv_transfer")
        assert pull.attributes["tandem.kv_transfer.cause"] == "peer_does_not_fit"


async def test_a_wrong_collector_is_told_before_the_weights_are_loaded(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    with capture_logs() as lines, pytest.raises(ConfigError, match="no URL"):
        await cluster.start("decode", checkpoints["qwen3"], otlp_traces_endpoint="collector:4317")
    assert not [line for line in lines if line["event"] == "loading the model"]
