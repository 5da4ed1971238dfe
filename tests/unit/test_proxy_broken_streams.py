"""Answers whose decode node fails after their first token: they go on elsewhere, or end clearly."""

import asyncio
import json
from typing import Any

import aiohttp
import openai
import pytest

from engine.errors import TandemError
from tests.node_double import ScriptedNode, metric, running_cluster, tokens_of

PROMPT = [5, 6, 7]
ASK: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}


async def first_events(reply: aiohttp.ClientResponse, count: int) -> str:
    """The first events of a stream: what the client has, the proxy has had."""
    lines = [(await reply.content.readline()).decode() for _ in range(2 * count)]
    return "".join(lines)


async def settle() -> str:
    """Without a stream nothing shows when the proxy has read what D sent before it hung."""
    await asyncio.sleep(0.5)
    return ""


@pytest.mark.parametrize("with_other", [False, True])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_d_lost_in_mid_stream_is_replaced_or_an_explicit_error(
    stream: bool, with_other: bool, tiny_files: dict[str, bytes]
) -> None:
    p, other = ScriptedNode("p", "prefill", num_cached=1), ScriptedNode("d2", files=tiny_files)
    d = ScriptedNode("d1", hang_at=2, files=tiny_files)
    async with running_cluster([p], [d, other] if with_other else [d]) as client:
        # With ids each output is an event, even when its text is half a character and waits.
        body = {**ASK, "stream": stream, "return_token_ids": True}
        url = f"{client.base_url}completions"
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(url, json=body))
            await d.hanging.wait()
            seen = await first_events(await asking, 2) if stream else await settle()
            p.num_cached = 3
            await d.close()
            reply = await asking
            text = seen + await reply.text()
        base = str(client.base_url).removesuffix("/v1/")
        counted = await metric(base, "tandem_proxy_broken_streams_total")
    assert counted == [1]
    assert p.released[0] == (p.engine_id, "p-1", "abort")
    if with_other:
        assert_continued(text, p, other, stream=stream)
        return
    last = text.strip().splitlines()[-1].removeprefix("data: ")
    assert "broke off after 2 tokens" in json.loads(last)["error"]["message"]
    assert "[DONE]" not in text
    assert reply.status == (200 if stream else 503)


def assert_continued(text: str, p: ScriptedNode, d: ScriptedNode, *, stream: bool) -> None:
    """P and D got the tokens that the client has, and the client notices nothing."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert (lines.pop() == "[DONE]") if stream else len(lines) == 1
    replies = [json.loads(line) for line in lines]
    ids = [token for reply in replies for token in reply["choices"][0]["token_ids"] or ()]
    expected = tokens_of(PROMPT, ASK["max_tokens"])
    assert ids == expected
    if not stream:
        assert replies[0]["usage"]["completion_tokens"] == len(expected)
        assert replies[0]["usage"]["prompt_tokens_details"]["cached_tokens"] == 1
    for_p, for_d = p.requests[1], d.requests[0]
    assert for_p.output_token_ids == for_d.output_token_ids == tuple(expected[:2])
    assert (for_p.sampling.max_tokens, for_d.sampling.max_tokens) == (3, len(expected))
    assert for_d.prompt_token_ids == tuple(PROMPT)
    assert for_d.sampling.seed == for_p.sampling.seed
    assert for_d.kv_transfer_params is not None
    assert for_d.kv_transfer_params.remote_request_id == "p-2"


async def test_an_answer_goes_on_a_bounded_number_of_times() -> None:
    ds = [ScriptedNode(f"d{index}", error=TandemError("bug"), fail_at=1) for index in range(6)]
    async with running_cluster([], ds) as client:
        with pytest.raises(openai.APIStatusError, match="broke off after 5 tokens"):
            await client.completions.create(**{**ASK, "max_tokens": 20})
    assert sorted(len(d.requests) for d in ds) == [0, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("num_tokens", "num_lost"), [(3, 2), (30, 3)])
async def test_a_node_lost_after_many_tokens_was_not_lost_because_of_them(
    num_tokens: int, num_lost: int
) -> None:
    """Nodes that go away soon after each other may have the request to blame."""
    ds = [ScriptedNode(f"d{index}", hang_at=num_tokens) for index in range(4)]
    async with running_cluster([], ds) as client:
        body = {**ASK, "max_tokens": 4 * num_tokens}
        asking = asyncio.create_task(client.completions.create(**body))
        for _ in range(num_lost):
            waiting = [asyncio.create_task(d.hanging.wait()) for d in ds]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            (at_work,) = [d for d in ds if d.hanging.is_set()]
            ds.remove(at_work)
            await settle()
            await at_work.close()
        if num_lost == 2:
            with pytest.raises(openai.APIStatusError, match="broke off after 6 tokens"):
                await asking
            return
        reply = await asking
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 4 * num_tokens
