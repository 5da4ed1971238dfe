"""Faults and omissions of clients: broken bodies, wrong keys, odd labels, early disconnects."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from engine.errors import EngineDeadError, UnavailableError
from serving.api.endpoint import merge
from serving.api.served_model import ServedModel
from tests.support.api.api_double import ScriptedGenerator, outputs_of, running
from tests.support.nodes.cluster import until
from tests.support.nodes.leaks import running_tasks

pytestmark = pytest.mark.asyncio
SERVING = {"strict_api": True}
JSON = {"content-type": "application/json"}
PATH = "/v1/completions"


async def fetch(
    url: str, data: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, Any, dict[str, str]]:
    """Status, body (parsed where it is JSON) and headers; POST when there is data."""
    method = "GET" if data is None else "POST"
    async with (
        aiohttp.ClientSession() as session,
        session.request(method, url, data=data, headers=headers) as reply,
    ):
        text = await reply.text()
        is_json = reply.headers.get("content-type", "").startswith("application/json")
        return (
            reply.status,
            json.loads(text) if is_json else text,
            {name.lower(): value for name, value in reply.headers.items()},
        )


@pytest.mark.parametrize(
    ("data", "status", "message"),
    [
        (b"{", 400, "not valid JSON"),
        (b"[1]", 400, "JSON object"),
        (b'{"prompt": "\xff"}', 400, "not valid JSON"),
        (b'{"prompt": [1], "temperature": NaN}', 400, "not valid JSON"),
        (b'{"prompt": ' + b"[" * 200_000, 400, "nested deeper"),
        (b'{"prompt": [1], "bogus": 1}', 400, "bogus=1: unknown parameter"),
        (b'{"prompt": [1], "max_tokens": 0}', 400, "max_tokens=0"),
        (b'{"prompt": [1], "model": "gpt"}', 404, "'gpt' is not served"),
        (b" " * 33_554_433, 413, "larger than 1572864 bytes"),
    ],
    ids=lambda v: repr(v)[:30],
)
async def test_wrong_bodies(served: ServedModel, data: bytes, status: int, message: str) -> None:
    generator = ScriptedGenerator([])
    async with running(generator, served) as base:
        got, body, _ = await fetch(base + PATH, data, JSON)
    assert got == status and message in body["error"]["message"]
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert generator.requests == []


async def test_body_without_length_is_bounded_too(served: ServedModel) -> None:
    async def chunks() -> Any:
        for _ in range(40):
            yield b" " * 1_000_000

    async with (
        running(ScriptedGenerator([]), served) as base,
        aiohttp.ClientSession() as session,
        session.post(base + PATH, data=chunks(), headers=JSON) as reply,
    ):
        assert reply.status == 413


async def test_wrong_path_method_and_media_type(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served) as base:
        assert (await fetch(f"{base}/v1/nothing"))[0] == 404
        status, body, _ = await fetch(base + PATH)
        assert (status, body["error"]["code"]) == (405, 405)
        assert (await fetch(base + PATH, b"{}", {"content-type": "text/plain"}))[0] == 415


async def test_openai_client_sees_param_and_code(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served) as base:
        client = openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="x", max_retries=0)
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", prompt=[1] * 300)
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt=[1])
        assert missing.value.code == "model_not_found"


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Bearer secre",
        "Bearer secrets",
        "Basic secret",
    ],
)
async def test_without_the_key_there_is_no_entry(served: ServedModel, header: str | None) -> None:
    headers = JSON if header is None else {**JSON, "Authorization": header}
    async with running(ScriptedGenerator([]), served, api_key="secret") as base:
        for path in (PATH, "/v1/chat/completions", "/tokenize", "/detokenize"):
            status, body, _ = await fetch(f"{base}{path}?api_key=secret", b"{}", headers)
            assert (status, body["error"]["type"]) == (401, "authentication_error")
        for path in ("/v1/models", "/version", "/v1/models/tiny", "/nothing"):
            assert (await fetch(base + path, headers=headers))[0] == 401
        for path in ("/health", "/live", "/ready", "/ping", "/metrics"):
            assert (await fetch(base + path, headers=headers))[0] == 200


async def test_the_key_opens(served: ServedModel) -> None:
    script = outputs_of([70])
    async with running(ScriptedGenerator(script), served, api_key="sécret") as base:
        for scheme in ("Bearer", "bearer"):
            headers = {**JSON, "Authorization": f"{scheme} sécret"}
            assert (await fetch(base + PATH, b'{"prompt": [1]}', headers))[0] == 200
        headers = {**JSON, "x-api-key": "sécret"}
        assert (await fetch(base + PATH, b'{"prompt": [1]}', headers))[0] == 200
        for wrong in ({"x-api-key": "other"}, {**headers, "Authorization": "Bearer other"}):
            status, body, _ = await fetch(base + "/v1/messages", b"{}", {**JSON, **wrong})
            assert (status, body["type"]) == (401, "error")
            assert body["error"]["type"] == "authentication_error" and body["request_id"]


@pytest.mark.parametrize(
    ("sent", "echoed", "carried"),
    [
        ("req-1", "req-1", "req-1"),
        ("a b\tc", "a_b_c", "a_b_c"),
        ("10.0.0.1:80/../x", "10.0.0.1:80/../x", None),
        ('"<b>', '"<b>', None),
        ("\u00e9" + "a" * 5000, None, "__" + "a" * 126),
    ],
)
async def test_request_id_is_only_a_label(
    served: ServedModel, sent: str, echoed: str | None, carried: str | None
) -> None:
    """The reply's id carries it if it is plain; nodes know each request by an id of its own."""
    generator = ScriptedGenerator(outputs_of([70]))
    async with running(generator, served) as base:
        headers = {**JSON, "X-Request-Id": sent}
        for _ in range(2):
            status, body, got = await fetch(base + PATH, b'{"prompt": [1]}', headers)
            assert status == 200
            told = body["id"]
        label = got["x-request-id"]
    assert label == echoed or (echoed is None and len(label) == 128 and label.isascii())
    assert told == f"cmpl-{carried}" if carried else len(told) == len("cmpl-") + 32
    first, second = (request.request_id for request in generator.requests)
    assert first != second and sent not in (first, second)


async def test_every_reply_has_a_request_id_errors_included(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served, api_key="k") as base:
        _, _, first = await fetch(f"{base}/version")
        _, _, second = await fetch(f"{base}/health", headers={"X-Request-Id": ""})
    assert len(first["x-request-id"]) == len(second["x-request-id"]) == 32


async def test_probes_tell_live_from_ready(served: ServedModel) -> None:
    generator = ScriptedGenerator([], unready=True)
    async with running(generator, served) as base:
        assert (await fetch(f"{base}/health"))[:2] == (200, "")
        status, body, headers = await fetch(f"{base}/ready")
        assert (status, body["error"]["message"]) == (503, "draining")
        assert headers["retry-after"] == "7"
        generator.error = EngineDeadError("the engine stopped")
        for path in ("/health", "/live", "/ping"):
            assert (await fetch(base + path))[0] == 503


async def test_load_counts_requests_under_way(served: ServedModel) -> None:
    generator = ScriptedGenerator(outputs_of([70]), endless=True)
    async with running(generator, served, api_key="k") as base:
        assert (await fetch(f"{base}/load"))[:2] == (200, {"server_load": 0})
        headers = {**JSON, "authorization": "Bearer k"}
        asked = [
            asyncio.create_task(fetch(base + PATH, b'{"prompt": [1]}', headers)) for _ in range(2)
        ]
        await until(lambda: generator.open == 2)
        assert (await fetch(f"{base}/load"))[1] == {"server_load": 2}
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
        await until(lambda: generator.open == 0)
        async with asyncio.timeout(5):
            while (await fetch(f"{base}/load"))[1] != {"server_load": 0}:
                pass


async def test_metrics_and_version(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served) as base:
        _, text, headers = await fetch(f"{base}/metrics")
        assert "tandem_probe_total 1.0" in text
        assert headers["content-type"].startswith("text/plain; version=")
        assert (await fetch(f"{base}/version"))[1] == {"version": "0.1.0"}


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_cancels_everything(
    served: ServedModel, n: int, stream: bool
) -> None:
    generator = ScriptedGenerator(outputs_of([70, 71])[:1], endless=True)
    async with running(generator, served) as base:
        await fetch(f"{base}/health")
        before = len(running_tasks())
        session = aiohttp.ClientSession()
        body = {"prompt": [1], "stream": stream, "n": n}
        asking = asyncio.create_task(session.post(base + PATH, json=body))
        await until(lambda: generator.open == n)
        if stream:
            await asking
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await session.close()
        await until(lambda: generator.open == 0)
        await until(lambda: len(running_tasks()) <= before)
    assert generator.cancelled == n


@pytest.mark.parametrize(
    ("path", "key"), [("/v1/responses", "input"), ("/v1/messages", "messages")]
)
async def test_so_it_does_in_the_middle_of_named_events(
    served: ServedModel, path: str, key: str
) -> None:
    generator = ScriptedGenerator(outputs_of([70, 71])[:1], endless=True)
    hello = [{"role": "user", "content": "hello"}]
    body = {key: hello, "max_tokens": 9, "stream": True}
    async with running(generator, served) as base, aiohttp.ClientSession() as session:
        async with session.post(base + path, json=body) as response:
            assert (await response.content.readline()).startswith(b"event: ")
        await until(lambda: generator.open == 0)
    assert generator.cancelled == 1


async def test_a_client_that_leaves_while_sending_its_body_does_no_harm(
    served: ServedModel,
) -> None:
    generator = ScriptedGenerator(outputs_of([70]))
    async with running(generator, served) as base:
        host, port = base.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        writer.write(f"{head}Content-Length: 100\r\n\r\n{{".encode())
        await writer.drain()
        writer.close()
        assert (await fetch(base + PATH, b'{"prompt": [1]}', JSON))[0] == 200
    assert len(generator.requests) == 1


async def test_merge_takes_at_most_one_item_ahead_of_a_slow_reader() -> None:
    taken = [0, 0]

    async def counting(index: int) -> Any:
        while True:
            taken[index] += 1
            yield index

    merged = merge([counting(0), counting(1)])
    for _ in range(6):
        await anext(merged)
        await asyncio.sleep(0)
    await merged.aclose()
    assert sum(taken) <= 6 + 2


async def test_closing_a_merge_closes_every_stream_at_once() -> None:
    closed: list[int] = []

    async def remembering(index: int) -> Any:
        try:
            yield index
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            closed.append(index)

    streams = [remembering(0), remembering(1), remembering(2)]
    merged = merge(streams)
    await anext(merged)
    await merged.aclose()
    assert sorted(closed) == [0, 1, 2]


async def test_a_silent_stream_says_that_it_goes_on_and_can_be_left(served: ServedModel) -> None:
    generator = ScriptedGenerator([], endless=True)
    served = replace(served, sse_keep_alive_interval=0.05)
    async with running(generator, served) as base, aiohttp.ClientSession() as session:
        before = len(running_tasks())
        async with session.post(base + PATH, json={"prompt": [1], "stream": True}) as reply:
            assert reply.status == 200
            for _ in range(3):
                assert await reply.content.readuntil(b"\n\n") == b": keep-alive\n\n"
            reply.close()
        await until(lambda: generator.open == 0)
        await until(lambda: len(running_tasks()) <= before)
    assert generator.cancelled == 1
    # Tokens that come in time look as they do without the option, and so does an early error.
    for error, status in ((None, 200), (UnavailableError("no node"), 503)):
        generator = ScriptedGenerator([] if error else outputs_of([70, 71]), error=error)
        async with running(generator, replace(served, sse_keep_alive_interval=60.0)) as base:
            body = b'{"prompt": [1], "stream": true}'
            found, text, _ = await fetch(base + PATH, body, JSON)
            assert found == status and "keep-alive" not in str(text)
