"""Traces at their edges: no parent, nonsense, a collector that is away, wrong options."""

import asyncio
import sys
import threading
from typing import Any

import pytest

from engine.errors import ConfigError
from serving.config import NodeConfig
from serving.telemetry.telemetry import Telemetry
from serving.telemetry.traces import MAX_QUEUED_SPANS, Traces
from tests.support.api.collector import Collector, collecting
from tests.support.api.node_double import ScriptedNode, running_cluster
from tests.support.nodes.cluster import all_back
from tests.support.nodes.leaks import held_here
from tests.tiers import everyday

PARENT = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"


async def test_a_request_of_nobody_s_trace_begins_one(tiny_files: dict[str, bytes]) -> None:
    """And without a collector, or with a client's nonsense, everything works as ever."""
    d = ScriptedNode("d", files=tiny_files)
    async with collecting() as collector:
        async with running_cluster([], [d], otlp_traces_endpoint=collector.grpc_url) as client:
            for header in ({}, {"traceparent": "00-nonsense"}):
                asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
                await client.completions.create(**asked, extra_headers=header)  # type: ignore[call-overload]
        roots = collector.named("tandem-proxy", "llm_request")
    assert len({it.span.trace_id for it in roots}) == 2
    assert all(not it.span.parent_span_id for it in roots)
    given = [request.origin.traceparent.split("-")[1] for request in d.requests]
    assert given == [it.span.trace_id.hex() for it in roots]
    async with running_cluster([], [d]) as client:
        await client.completions.create(
            model="tiny", prompt=[5, 6], max_tokens=2, extra_headers={"traceparent": PARENT}
        )
    assert d.requests[-1].origin.traceparent == PARENT


class Hanging(Collector):
    """Takes calls and never answers them."""

    async def Export(self, request: object, context: object) -> Any:
        await asyncio.sleep(60)


@pytest.mark.parametrize("hangs", everyday((False, True), (True,)))
async def test_a_collector_that_is_away_or_hangs_holds_up_nobody(
    hangs: bool, tiny_files: dict[str, bytes]
) -> None:
    async with collecting(Hanging) as collector:
        endpoint = collector.grpc_url if hangs else "http://127.0.0.1:1"

        async def live() -> None:
            d = ScriptedNode("d", files=tiny_files)
            async with running_cluster([], [d], otlp_traces_endpoint=endpoint) as client:
                for _ in range(3):
                    await client.completions.create(model="tiny", prompt=[5, 6], max_tokens=2)

        await live()  # libraries open what they keep for good
        before = held_here()
        async with asyncio.timeout(10):
            await live()
        await all_back(before)
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("Otel")]


async def test_spans_that_nobody_takes_are_bounded() -> None:
    traces = Traces("http://127.0.0.1:1", service="s", instance="i")
    try:
        for _ in range(3 * MAX_QUEUED_SPANS):
            traces._tracer.start_span("x").end()
        (processor,) = traces._provider._active_span_processor._span_processors
        queue = processor._batch_processor._queue  # type: ignore[attr-defined]
        assert len(queue) <= MAX_QUEUED_SPANS
    finally:
        await traces.close()


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://host:4317", "http://", "grpc://h:1"])
def test_a_wrong_endpoint_is_named(endpoint: str) -> None:
    config = NodeConfig(model="m", otlp_traces_endpoint=endpoint)
    with pytest.raises(ConfigError, match="no URL: write http://HOST:4317"):
        Telemetry(config, role="decode", instance="i")


def test_without_the_packages_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "serving.telemetry.traces")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    config = NodeConfig(model="m", otlp_traces_endpoint="http://127.0.0.1:4317")
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        Telemetry(config, role="decode", instance="i")


async def test_opentelemetry_may_be_switched_off_by_its_own_variable(
    monkeypatch: pytest.MonkeyPatch, tiny_files: dict[str, bytes]
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    d = ScriptedNode("d", files=tiny_files)
    async with running_cluster([], [d], otlp_traces_endpoint="http://127.0.0.1:1") as client:
        for header in ({}, {"traceparent": PARENT}):
            asked = {"model": "tiny", "prompt": [5, 6], "max_tokens": 2}
            await client.completions.create(**asked, extra_headers=header)  # type: ignore[call-overload]
    assert [it.origin.traceparent for it in d.requests] == ["", PARENT]
