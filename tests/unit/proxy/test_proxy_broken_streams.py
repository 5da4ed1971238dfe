"""Answers whose decode node fails after their first token: they go on elsewhere, or end clearly."""

import asyncio
import json

import aiohttp
import openai
import pytest

from engine.errors import TandemError
from proxy.server import ProxyServer
from tests.support.api.node_double import (
    ASK,
    IDS,
    POLL_S,
    PROMPT,
    WAIT_S,
    ScriptedNode,
    base_of,
    cluster_config,
    fetch,
    metric,
    running_cluster,
    running_nodes,
    tokens_of,
    until,
    until_status,
    until_used,
)


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
    ds = [d, other] if with_other else [d]
    async with running_cluster([p], ds, inter_token_timeout=2) as client:
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
        counted = await metric(base_of(client), "tandem_proxy_broken_streams_total")
    assert sum(counted) == 1
    assert p.released[0] == (p.engine_id, "p-1", "abort")
    if with_other:
        assert_continued(text, p, other, stream=stream)
        return
    last = text.strip().splitlines()[-1].removeprefix("data: ")
    assert "broke off after 2 tokens" in json.loads(last)["error"]["message"]
    assert "[DONE]" not in text
    assert reply.status == (200 if stream else 503)


async def test_an_answer_goes_on_with_the_same_model_alone() -> None:
    """Another one's next tokens would be right for nobody; new requests it may have."""
    p = ScriptedNode("p", "prefill", model_identity="new")
    old, new = ScriptedNode("d1", hang_at=2), ScriptedNode("d2", model_identity="new")
    old.model_identity = "old"
    async with running_cluster([p], [old], inter_token_timeout=1) as client:
        url, body = f"{client.base_url}completions", {**ASK, **IDS, "stream": True}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
            text = await reply.text()
    assert "broke off after 2 tokens" in text and not p.requests, "P's model is another"
    old = ScriptedNode("d1", hang_at=2, model_identity="old")
    async with running_cluster([p], [old, new], inter_token_timeout=1) as client:
        for _ in range(4):
            answer = await ask_quietly(client)
            assert answer is None or answer == tokens_of(PROMPT, 4)
    assert all(not it.output_token_ids for it in new.requests), "none was old's to begin with"
    assert any(not it.output_token_ids for it in p.requests), "it prefills for its equal"


async def ask_quietly(client: openai.AsyncOpenAI) -> list[int] | None:
    """The tokens of an answer; None where it broke off."""
    url, body = f"{client.base_url}completions", {**ASK, **IDS}
    async with aiohttp.ClientSession() as session, session.post(url, json=body) as reply:
        told = await reply.json()
        return told["choices"][0]["token_ids"] if reply.status == 200 else None


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


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_waits_for_a_d_that_restarts(
    stream: bool, tiny_files: dict[str, bytes]
) -> None:
    p, d = ScriptedNode("p", "prefill", num_cached=1), ScriptedNode("d1", hang_at=2)
    d.files, again = tiny_files, ScriptedNode("d2")
    async with running_cluster([p], [d]) as client:
        url, body = f"{client.base_url}completions", {**ASK, "stream": stream, **IDS}
        async with aiohttp.ClientSession() as session:
            asking = asyncio.create_task(session.post(url, json=body))
            await d.hanging.wait()
            seen = await first_events(await asking, 2) if stream else await settle()
            port = d.port
            await d.close()
            await until_used(base_of(client), 1)
            await again.start(port)
            reply = await asking
            text = seen + await reply.text()
            await again.close()
        counted = await metric(base_of(client), "tandem_proxy_broken_streams_total")
    assert sum(counted) == 1
    assert_continued(text, p, again, stream=stream)
    assert p.released == [(p.engine_id, "p-1", "abort")]


@pytest.mark.parametrize("end", ["same life", "request timeout", "shutdown"])
async def test_no_answer_waits_for_a_d_in_vain(end: str, tiny_files: dict[str, bytes]) -> None:
    """It ends as soon as nobody can come, although --inter-token-timeout is a minute."""
    d = ScriptedNode("d", hang_at=2, files=tiny_files)
    options = {"request_timeout": 2.0} if end == "request timeout" else {}
    async with running_nodes(d), aiohttp.ClientSession() as session, asyncio.timeout(WAIT_S):
        # Also where no node answers meanwhile.
        poll_s = 60.0 if end == "shutdown" else POLL_S
        server = ProxyServer(cluster_config([], [d], **options), poll_interval_s=poll_s)
        await server.start()
        base = f"http://127.0.0.1:{server.port}"
        await until_status(f"{base}/ready", 200)
        body = {**ASK, **IDS, "stream": True}
        reply = await session.post(f"{base}/v1/completions", json=body)
        await first_events(reply, 2)
        port = d.port
        await d.close()
        await until_used(base, 0)
        if end == "same life":
            await d.start(port)
        if end == "shutdown":
            await server.drain()
            await server.close()
        last = (await reply.text()).strip().splitlines()[-1]
        await server.close()
    assert "broke off after 2 tokens" in json.loads(last.removeprefix("data: "))["error"]["message"]
    assert len(d.requests) == 1


async def test_a_client_that_leaves_ends_the_wait_for_a_d(tiny_files: dict[str, bytes]) -> None:
    p = ScriptedNode("p", "prefill", files=tiny_files)
    d = ScriptedNode("d", hang_at=2, files=tiny_files)
    async with running_cluster([p], [d]) as client:
        base = base_of(client)
        async with aiohttp.ClientSession() as session:
            body = {**ASK, **IDS, "stream": True}
            reply = await session.post(f"{base}/v1/completions", json=body)
            await first_events(reply, 2)
            await d.close()
            await until_used(base, 1)
            await until_load(base, 1)
            await until(lambda: is_released(p))
        await until_load(base, 0)
    assert len(p.requests) == 1


async def is_released(p: ScriptedNode) -> bool:
    """P's part ends with D, whoever waits then."""
    return p.released == [(p.engine_id, "p-1", "abort")]


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_client_that_leaves_frees_the_nodes_of_a_continuation(kind: str) -> None:
    p, other = ScriptedNode("p", "prefill"), ScriptedNode("d2", hang_at=0)
    d = ScriptedNode("d1", hang_at=2)
    async with running_cluster([p], [d, other]) as client:
        asking = asyncio.create_task(client.completions.create(**ASK))
        await d.hanging.wait()
        await settle()
        p.hang_at = 0 if kind == "prefill" else None
        at_work = p if kind == "prefill" else other
        await d.close()
        await at_work.hanging.wait()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        second = p.requests[1].request_id if kind == "prefill" else "p-2"

        async def is_free() -> bool:
            names = [name for _, name, _ in p.released]
            return names == ["p-1", second] and at_work.num_cut == 1

        await until(is_free)
        await until_load(base_of(client), 0)
        assert (p.num_open, other.num_open) == (0, 0)


async def until_load(base: str, count: int) -> None:
    """Waits until so many requests are under way."""

    async def is_so() -> bool:
        return bool(json.loads((await fetch(f"{base}/load"))[1])["server_load"] == count)

    await until(is_so)


@pytest.mark.parametrize("with_other", [False, True])
async def test_a_d_that_stops_between_tokens_is_given_up(with_other: bool) -> None:
    """It can be reached and did not restart, so nobody waits for it again."""
    hung, other = ScriptedNode("d1", hang_at=2), ScriptedNode("d2")
    ds = [hung, other] if with_other else [hung]
    async with running_cluster([], ds, inter_token_timeout=0.5) as client:
        if with_other:
            reply = await client.completions.create(**ASK, extra_body=IDS)
            assert (reply.choices[0].model_extra or {})["token_ids"] == tokens_of(PROMPT, 4)
        else:
            with pytest.raises(openai.APIStatusError, match="broke off after 2 tokens"):
                await client.completions.create(**ASK)

        async def is_cut() -> bool:
            return hung.num_cut == 1

        await until(is_cut)
    assert [len(d.requests) for d in ds] == [1] * len(ds)


@pytest.mark.parametrize("with_p", [False, True])
async def test_a_continuation_does_not_score_the_prompt_again(with_p: bool) -> None:
    """Its log-probabilities came with the first token; to know them again no hit may be used."""
    d, other = ScriptedNode("d1", hang_at=2), ScriptedNode("d2")
    ps = [ScriptedNode("p", "prefill")] if with_p else []
    async with running_cluster(ps, [d, other]) as client:
        asked = client.completions.create(**ASK, extra_body={"prompt_logprobs": 1})
        asking = asyncio.create_task(asked)
        await d.hanging.wait()
        await settle()
        await d.close()
        await asking
    first, *later = [it.sampling for node in (*ps, d, other) for it in node.requests]
    assert first.prompt_logprobs == 1
    assert [it.prompt_logprobs for it in later] == [None] * (3 if with_p else 1)


async def test_an_answer_goes_on_a_bounded_number_of_times() -> None:
    ds = [ScriptedNode(f"d{index}", error=TandemError("bug"), fail_at=1) for index in range(6)]
    async with running_cluster([], ds) as client:
        with pytest.raises(openai.APIStatusError, match="broke off after 5 tokens"):
            await client.completions.create(**{**ASK, "max_tokens": 20})
    assert sorted(len(d.requests) for d in ds) == [0, 1, 1, 1, 1, 1]


async def test_an_end_before_the_first_token_of_a_continuation_counts() -> None:
    """The other D refuses before it has sent a token: the stream has ended with an error."""
    ds = [ScriptedNode(f"d{index}", hang_at=2) for index in range(2)]
    async with running_cluster([], ds, inter_token_timeout=2) as client:
        asking = asyncio.create_task(client.completions.create(**ASK))
        waiting = [asyncio.create_task(d.hanging.wait()) for d in ds]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        lost, other = sorted(ds, key=lambda d: not d.hanging.is_set())
        other.error = TandemError("bug")
        await settle()
        await lost.close()
        with pytest.raises(openai.APIStatusError, match="broke off after 2 tokens"):
            await asking
        name = "tandem_proxy_broken_streams_total"
        counted = [await metric(base_of(client), name, outcome=it) for it in ("continued", "ended")]
    assert counted == [[1], [1]]


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


async def test_what_a_continuation_finds_of_itself_does_not_count_as_cached() -> None:
    p = ScriptedNode("p", "prefill")
    first, second = (ScriptedNode(name, hang_at=2) for name in ("d1", "d2"))
    async with running_cluster([p], [first, second]) as client:
        asked = asyncio.create_task(client.completions.create(**ASK))

        async def hangs() -> bool:
            return first.hanging.is_set() or second.hanging.is_set()

        await until(hangs)
        lost, other = (first, second) if first.hanging.is_set() else (second, first)
        p.num_cached, other.hang_at = len(PROMPT) + 1, None  # P finds what it has computed before
        await lost.close()
        usage = (await asked).usage
        status = json.loads((await fetch(f"{base_of(client)}/status"))[1])
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert status["requests"][0]["cached_tokens"] == status["totals"]["cached_tokens"] == 0
