"""One line for each request that ended, and one of throughput: what they say and what they hide."""

import asyncio
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import openai
import pytest
import structlog

from engine.errors import (
    ConfigError,
    InvalidRequestError,
    KVTransferParamsError,
    TandemError,
    UnavailableError,
)
from engine.types import FinishReason, GenerateOutput, GenerateRequest
from proxy.config import ProxyConfig
from serving.config import load_config
from serving.process import configure_logging
from serving.telemetry.request_log import RequestLog, log_throughput
from serving.telemetry.request_records import RequestRecords
from tests.support.api.node_double import ScriptedNode, running_cluster

SECRET = "open sesame"
REQUEST = GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3))


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


def of_requests(lines: list[Any]) -> list[Any]:
    return [line for line in lines if line["event"] == "request ended"]


async def test_each_request_leaves_one_line_without_its_text(
    lines: list[Any], tiny_files: dict[str, bytes]
) -> None:
    p, d = ScriptedNode("p", "prefill", files=tiny_files), ScriptedNode("d", files=tiny_files)
    async with running_cluster([p], [d]) as client:
        await client.completions.create(
            model="tiny", prompt=SECRET, max_tokens=4, extra_headers={"X-Request-Id": "mine"}
        )
        d.error = UnavailableError("gone")
        with pytest.raises(openai.APIStatusError):
            await client.completions.create(model="tiny", prompt=SECRET, max_tokens=4)
    done, failed = of_requests(lines)
    num_tokens = len(p.requests[0].prompt_token_ids)
    assert done["x_request_id"] == "mine" and done["request_id"]
    assert (done["prompt_tokens"], done["tokens"]) == (num_tokens, 4)
    assert done["outcome"] == "length" and 0 < done["ttft_ms"] <= done["e2e_ms"]
    where = [visit.split()[:3] for visit in done["visits"]]
    assert where == [["prefill", p.url, "ok"], ["decode", d.url, "ok"]]
    assert failed["outcome"] not in list(FinishReason) and failed["tokens"] == 0
    said = json.dumps(lines, default=repr)
    assert SECRET not in said and str(list(p.requests[0].prompt_token_ids)) not in said


async def test_a_bug_is_logged_as_a_failure_and_not_as_a_caller_that_left(lines: list[Any]) -> None:
    records = RequestRecords(RequestLog())
    for error in (ZeroDivisionError(), asyncio.CancelledError()):
        with suppress(type(error)), records.recording(REQUEST):
            raise error
    assert [line["outcome"] for line in of_requests(lines)] == ["ZeroDivisionError", "left"]
    assert records.num_failed == 1 and not records.open


async def test_a_request_that_was_wrong_is_no_failure_of_the_cluster() -> None:
    records = RequestRecords()
    errors = InvalidRequestError("long"), KVTransferParamsError("foreign"), UnavailableError("x")
    for error in errors:
        with suppress(TandemError), records.recording(REQUEST):
            raise error
    assert [it.failed for it in records.recent] == [False, True, True]
    assert records.num_failed == 2


async def test_throughput_is_logged_while_there_is_work(lines: list[Any]) -> None:
    records = RequestRecords()
    loud = asyncio.create_task(log_throughput(records, lambda: {"num_waiting": 3}, every_s=0.05))
    try:
        await asyncio.sleep(0.12)
        assert not lines
        with records.recording(REQUEST) as record:
            record.observe(GenerateOutput(token_ids=(4, 5)))
            async with asyncio.timeout(10):
                while len(lines) < 2:  # noqa: ASYNC110 - no event tells
                    await asyncio.sleep(0.01)
    finally:
        loud.cancel()
        with suppress(asyncio.CancelledError):
            await loud
    first, second, *_ = [line for line in lines if line["event"] == "throughput"]
    assert (first["prompt_tokens_per_s"], first["tokens_per_s"]) == (60.0, 40.0)
    assert first["num_requests"] == 1 and first["num_waiting"] == 3
    assert second["tokens_per_s"] == 0


def test_the_log_level_is_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    told = io.StringIO()
    monkeypatch.setattr("sys.stderr", told)
    try:
        for level, loud in (("warning", False), ("debug", True)):
            configure_logging(level)
            structlog.get_logger().info(level)
            assert (f'"event": "{level}"' in told.getvalue()) is loud
    finally:
        structlog.reset_defaults()
    flags = {"decode": ["grpc://127.0.0.1:1"], "log_level": "loud"}
    with pytest.raises(ConfigError, match="loud"):
        load_config(ProxyConfig, None, flags)
