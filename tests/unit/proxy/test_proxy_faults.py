"""Nodes that fail before, during and after their part: tokens or a clear error."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import aiohttp
import openai
import pytest

from engine.errors import (
    EngineDeadError,
    EngineGenerateError,
    KVLoadError,
    KVTransferParamsError,
    OverloadedError,
    PromptTooLongError,
    TandemError,
    UnavailableError,
)
from engine.types import GenerateOutput, GenerateRequest
from proxy.server import ProxyServer
from tests.support.api.node_double import (
    ASK,
    PROMPT,
    ScriptedNode,
    base_of,
    client_of,
    cluster_config,
    metric,
    running_cluster,
    running_nodes,
    tokens_of,
    until,
    until_status,
    until_used,
)

NODE_FAULTS = [
    UnavailableError("draining"),
    OverloadedError("full"),
    TandemError("bug"),
]
ENGINE_FAULTS = [EngineDeadError("IndexError()"), EngineGenerateError("IndexError()")]


def prefiller(name: str, **options: Any) -> ScriptedNode:
    return ScriptedNode(name, "prefill", **options)


async def ask(client: openai.AsyncOpenAI) -> list[int]:
    reply = await client.completions.create(**ASK, extra_body={"return_token_ids": True})
    extra = reply.choices[0].model_extra
    assert extra is not None
    return list(extra["token_ids"])


async def error_of(client: openai.AsyncOpenAI, **changes: Any) -> openai.APIStatusError:
    with pytest.raises(openai.APIStatusError) as caught:
        await client.completions.create(**{**ASK, **changes})
    return caught.value


@pytest.mark.parametrize("error", NODE_FAULTS, ids=repr)
async def test_a_failing_p_is_replaced_by_the_next(error: TandemError) -> None:
    bad, good, d = prefiller("p1", error=error), prefiller("p2"), ScriptedNode("d")
    async with running_cluster([bad, good], [d]) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
    assert len(bad.requests) == len(good.requests) == 1
    params = d.requests[0].kv_transfer_params
    assert params is not None
    assert params.remote_engine_id == good.engine_id


async def test_after_two_failing_p_d_prefills_itself() -> None:
    ps = [prefiller(f"p{index}", error=OverloadedError("full")) for index in range(3)]
    d = ScriptedNode("d")
    async with running_cluster(ps, [d]) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
        reasons = await metric(
            base_of(client), "tandem_proxy_local_prefills_total", reason="prefill_failed"
        )
    assert sorted(len(p.requests) for p in ps) == [0, 1, 1]
    assert d.requests[0].kv_transfer_params is None
    assert reasons == [1]


async def test_a_p_that_keeps_its_params_to_itself_is_no_p() -> None:
    p, d = prefiller("p", gives_params=False), ScriptedNode("d")
    async with running_cluster([p], [d]) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
    assert d.requests[0].kv_transfer_params is None


async def test_a_stuck_p_is_given_up_and_told() -> None:
    p, d = prefiller("p", hang_at=0), ScriptedNode("d")
    async with running_cluster([p], [d], first_token_timeout=0.2) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
    assert p.num_cut == 1
    assert p.released == [(p.engine_id, p.requests[0].request_id, "abort")]
    assert d.requests[0].kv_transfer_params is None


async def test_a_p_that_died_is_not_asked_and_is_used_again_when_it_is_back() -> None:
    p, d = prefiller("p"), ScriptedNode("d")
    async with running_cluster([p], [d]) as client:
        port = p.port
        await p.close()
        for _ in range(2):
            assert await ask(client) == tokens_of(PROMPT, 4)
        await until_used(base_of(client), 1)
        await p.start(port)
        await until_used(base_of(client), 2)
        assert await ask(client) == tokens_of(PROMPT, 4)
    assert len(p.requests) == 1


@pytest.mark.parametrize("error", [*NODE_FAULTS, KVLoadError("lost")], ids=repr)
async def test_a_d_that_fails_before_its_first_token_is_replaced(error: TandemError) -> None:
    p, bad, good = prefiller("p"), ScriptedNode("d1", error=error), ScriptedNode("d2")
    async with running_cluster([p], [bad, good]) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
    assert (len(p.requests), len(bad.requests), len(good.requests)) == (2, 1, 1)
    fresh = good.requests[0].kv_transfer_params
    assert fresh is not None
    assert fresh.remote_request_id == "p-2"
    assert p.released == [(p.engine_id, "p-1", "abort")]


async def test_only_one_other_d_is_tried() -> None:
    ds = [ScriptedNode(f"d{index}", error=OverloadedError("full")) for index in range(3)]
    async with running_cluster([], ds) as client:
        error = await error_of(client)
    assert error.status_code == 429
    assert error.response.headers["retry-after"] == "1"
    assert sorted(len(d.requests) for d in ds) == [0, 1, 1]


async def test_a_refused_hand_over_is_p_s_fault_and_never_the_client_s() -> None:
    p, d = prefiller("p"), ScriptedNode("d", error=KVTransferParamsError("foreign"))
    async with running_cluster([p], [d]) as client:
        error = await error_of(client)
    assert error.status_code == 503
    assert [request.kv_transfer_params is None for request in d.requests] == [False, True]


async def test_d_computes_what_it_refuses_to_take_from_p() -> None:
    class Wary(ScriptedNode):
        async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
            self.error = KVTransferParamsError("foreign") if request.kv_transfer_params else None
            async with aclosing(super().generate(request)) as outputs:
                async for output in outputs:
                    yield output

    p, p2, d, d2 = prefiller("p"), prefiller("p2"), Wary("d"), ScriptedNode("d2")
    async with running_cluster([p, p2], [d]) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
    assert [len(node.requests) for node in (p, p2, d, d2)] == [1, 0, 2, 0]
    assert p.released == [(p.engine_id, "p-1", "abort")]


async def test_nodes_get_only_what_their_context_holds() -> None:
    """The client is told the longest one, whichever node was met first."""
    p, short, long = (
        prefiller("p", max_model_len=100),
        ScriptedNode("d1", max_model_len=50),
        ScriptedNode("d2", max_model_len=200),
    )
    async with running_cluster([p], [short, long]) as client:

        async def is_told() -> bool:
            model = (await client.models.list()).data[0].model_extra or {}
            return bool(model["max_model_len"] == 200)

        await until(is_told)
        for length in (60, 60, 150, 150):
            prompt = [7] * length
            reply = await client.completions.create(model="tiny", prompt=prompt, max_tokens=40)
            assert reply.usage is not None
            assert reply.usage.completion_tokens == 40
        told = await error_of(client, prompt=[7] * 190, max_tokens=40)
    assert told.status_code == 400
    assert "200" in told.message
    assert (len(p.requests), len(short.requests), len(long.requests)) == (2, 0, 4)


async def test_what_p_calls_a_client_s_mistake_is_left_to_d_and_no_other_node() -> None:
    error = PromptTooLongError("too long", param="prompt", code="context_length_exceeded")
    ps = [prefiller("p1", error=error), prefiller("p2")]
    ds = [ScriptedNode("d1"), ScriptedNode("d2")]
    async with running_cluster(ps, ds) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
        for d in ds:
            d.error = error
        await ps[1].close()
        told = await error_of(client)
    assert told.status_code == 400
    assert told.body["code"] == "context_length_exceeded"  # type: ignore[index]
    assert len(ps[0].requests) == 2
    assert sum(len(d.requests) for d in ds) == 2


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("error", ENGINE_FAULTS, ids=repr)
async def test_what_broke_one_engine_is_never_carried_to_another(
    kind: str, error: TandemError
) -> None:
    ps, ds = [prefiller("p1"), prefiller("p2")], [ScriptedNode("d1"), ScriptedNode("d2")]
    for node in ps if kind == "prefill" else ds:
        node.error = error
    async with running_cluster(ps, ds) as client:
        told = await error_of(client)
    assert told.status_code == 500
    assert "the engine failed" in told.message
    assert "IndexError" not in told.message
    assert sum(len(p.requests) for p in ps) == 1
    assert sum(len(d.requests) for d in ds) == (kind == "decode")


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_request_that_was_on_two_nodes_that_went_away_gets_no_third(kind: str) -> None:
    """A process that dies says nothing: the request may be why."""
    nodes = [ScriptedNode(f"{kind}-{index}", kind, hang_at=0) for index in range(3)]
    d = ScriptedNode("d")
    ps, ds = (nodes, [d]) if kind == "prefill" else ([], nodes)
    async with running_cluster(ps, ds) as client:
        asking = asyncio.create_task(error_of(client))
        for _ in range(2):
            waiting = [asyncio.create_task(node.hanging.wait()) for node in nodes]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            (at_work,) = [node for node in nodes if node.hanging.is_set()]
            nodes.remove(at_work)
            await at_work.close()
        told = await asking
    assert told.status_code == 503
    assert "127.0.0.1" not in told.message
    assert (len(nodes[0].requests), len(d.requests)) == (0, 0)


async def test_an_engine_that_fails_in_mid_stream_is_an_explicit_error() -> None:
    d = ScriptedNode("d", error=EngineDeadError("dead"), fail_at=3)
    async with running_cluster([], [d]) as client:
        error = await error_of(client)
    assert error.status_code == 500
    assert "after 3 tokens" in error.message
    assert "dead" not in error.message


@pytest.mark.parametrize("stream", [False, True])
async def test_a_proxy_that_ends_takes_nothing_new_and_cuts_nothing_without_a_word(
    stream: bool, tiny_files: dict[str, bytes]
) -> None:
    d = ScriptedNode("d1", hang_at=2 if stream else 0, files=tiny_files)
    other = ScriptedNode("d2", files=tiny_files)
    async with running_nodes(d, other):
        server = ProxyServer(cluster_config([], [d, other]), poll_interval_s=0.05)
        await server.start()
        base = f"http://127.0.0.1:{server.port}"
        await until_status(f"{base}/ready", 200)
        await until_used(base, 2)
        body = {**ASK, "stream": stream, "return_token_ids": True}
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(f"{base}/v1/completions", json=body))
            await d.hanging.wait()
            draining = asyncio.create_task(server.drain())
            await until_status(f"{base}/ready", 503)
            async with client_of(base) as client:
                refused = await error_of(client)
            await draining
            await server.close()
            reply = await asking
            text = await reply.text()
    assert refused.status_code == 503
    assert "shutting down" in refused.message
    assert reply.status == (200 if stream else 503)
    error = json.loads(text.strip().splitlines()[-1].removeprefix("data: "))["error"]
    assert ("broke off after 2 tokens" in error["message"]) == stream
    assert "[DONE]" not in text
    assert not other.requests


async def test_all_down_is_503_with_retry_after() -> None:
    p, d = prefiller("p"), ScriptedNode("d")
    async with running_cluster([p], [d]) as client:
        await d.close()
        error = await error_of(client)
        await until_used(base_of(client), 1)
        num_prefills = len(p.requests)
        again = await error_of(client)
    assert error.status_code == again.status_code == 503
    assert again.response.headers["retry-after"] == "1"
    assert "no decode node is available" in again.message
    assert "127.0.0.1" not in error.message + again.message
    assert len(p.requests) == num_prefills


async def test_a_request_that_takes_too_long_ends() -> None:
    p, d = prefiller("p"), ScriptedNode("d", hang_at=2)
    async with running_cluster([p], [d], request_timeout=0.3) as client:
        error = await error_of(client)
    assert error.status_code == 503
    assert d.num_cut == 1


async def test_a_wrong_cluster_token_is_no_401_for_clients() -> None:
    p, d = prefiller("p", token="other"), ScriptedNode("d", token="secret")
    options = {"cluster_token": "secret"}
    async with running_cluster([], [d], **options) as client:
        assert await ask(client) == tokens_of(PROMPT, 4)
        assert p.rpc is None
        assert d.rpc is not None
        d.token = "changed"
        port = d.port
        await d.close()
        await d.start(port)
        error = await error_of(client)
    assert error.status_code == 503


async def test_clients_need_the_api_key() -> None:
    async with running_cluster([], [ScriptedNode("d")], api_key="k") as client:
        assert (await error_of(client)).status_code == 401
        async with client_of(base_of(client), "k") as known:
            assert await ask(known) == tokens_of(PROMPT, 4)
