"""Requests through a real proxy to scripted nodes: who is asked what, what the client gets."""

import asyncio
from functools import partial
from typing import Any

import openai
import pytest

from engine.types import KVTransferParams
from tests.support.api.node_double import (
    ASK,
    IDS,
    PROMPT,
    ScriptedNode,
    base_of,
    client_of,
    cluster_config,
    fetch,
    metric,
    running_cluster,
    running_nodes,
    running_proxy,
    tokens_of,
    until,
    until_status,
)


async def token_ids(client: Any, **changes: Any) -> list[int]:
    reply = await client.completions.create(**{**ASK, **changes}, extra_body=IDS)
    return list(reply.choices[0].token_ids)


def params_of(node: ScriptedNode) -> KVTransferParams:
    params = node.requests[0].kv_transfer_params
    assert params is not None
    return params


async def test_p_prefills_and_d_decodes() -> None:
    p = ScriptedNode("p", "prefill", num_cached=2)
    d = ScriptedNode("d", num_cached=1)
    async with running_cluster([p], [d]) as client:
        reply = await client.completions.create(**ASK, seed=3, extra_body=IDS)
    assert reply.choices[0].model_extra["token_ids"] == tokens_of(PROMPT, 4)
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    asked_p, asked_d = p.requests[0], d.requests[0]
    handed = params_of(d)
    assert asked_p.kv_transfer_params == KVTransferParams(do_remote_decode=True)
    assert asked_p.sampling.max_tokens == 1
    assert asked_d.sampling.max_tokens == 4
    assert asked_d.sampling.seed == asked_p.sampling.seed == 3
    assert handed.remote_engine_id == p.engine_id
    assert handed.first_token_ids == (tokens_of(PROMPT, 1)[0],)
    assert (p.num_cut, d.num_cut, p.released) == (0, 0, [])


async def test_streams_arrive_as_they_are_made() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d", hang_at=2)
    async with running_cluster([p], [d]) as client:
        stream = await client.completions.create(**ASK, stream=True, extra_body=IDS)
        chunks = []
        async for chunk in stream:
            chunks += chunk.choices[0].model_extra["token_ids"]
            if len(chunks) == 2:
                break
        await stream.close()
    assert chunks == tokens_of(PROMPT, 2)


async def test_transfer_params_of_clients_are_stripped() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    evil = {"do_remote_prefill": True, "remote_host": "evil", "remote_port": 1}
    async with running_cluster([p], [d]) as client:
        await client.completions.create(**ASK, extra_body={"kv_transfer_params": evil})
    assert params_of(d).remote_host == "127.0.0.1"


async def test_without_prefill_nodes_d_does_it_all() -> None:
    d = ScriptedNode("d", num_cached=2)
    async with running_cluster([], [d]) as client:
        reply = await client.completions.create(**ASK, extra_body=IDS)
    assert reply.choices[0].model_extra["token_ids"] == tokens_of(PROMPT, 4)
    assert reply.usage.prompt_tokens_details.cached_tokens == 2
    assert d.requests[0].kv_transfer_params is None


async def test_a_first_token_that_ends_the_request_needs_no_d() -> None:
    p, d = ScriptedNode("p", "prefill", eos_at=0), ScriptedNode("d")
    async with running_cluster([p], [d]) as client:
        reply = await client.completions.create(**ASK, extra_body=IDS)
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].model_extra["token_ids"] == tokens_of(PROMPT, 1)
    assert not d.requests


async def test_min_tokens_keep_their_meaning_for_the_first_token() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    async with running_cluster([p], [d]) as client:
        await client.completions.create(**ASK, extra_body={"min_tokens": 3})
    assert (p.requests[0].sampling.min_tokens, d.requests[0].sampling.min_tokens) == (1, 3)


async def test_requests_take_nodes_in_turn() -> None:
    ps = [ScriptedNode("p1", "prefill"), ScriptedNode("p2", "prefill")]
    ds = [ScriptedNode("d1"), ScriptedNode("d2")]
    async with running_cluster(ps, ds, routing_policy="round_robin") as client:
        for _ in range(4):
            await token_ids(client)
    assert [len(node.requests) for node in (*ps, *ds)] == [2, 2, 2, 2]


async def test_chat_and_names_come_from_the_nodes(tiny_files: dict[str, bytes]) -> None:
    d = ScriptedNode("d", files=tiny_files)
    async with running_cluster([], [d], served_model_name=("mine", "alias")) as client:
        reply = await client.chat.completions.create(
            model="alias", messages=[{"role": "user", "content": "hello"}], max_tokens=3
        )
        models = await client.models.list()
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 3
    assert reply.choices[0].message.content
    assert models.data[0].id == "mine"
    assert (models.data[0].model_extra or {})["max_model_len"] == 4096


async def test_before_any_node_answers_the_proxy_is_alive_but_not_ready() -> None:
    d = ScriptedNode("d")
    async with running_nodes(d):
        config = cluster_config([], [d])
    async with running_proxy(config) as base, client_of(base) as client:
        assert [(await fetch(f"{base}{path}"))[0] for path in ("/health", "/live")] == [200, 200]
        assert (await fetch(f"{base}/ready"))[0] == 503
        assert (await fetch(f"{base}/metrics"))[0] == 200
        with pytest.raises(openai.APIStatusError, match="503") as caught:
            await token_ids(client)
        assert caught.value.response.headers["retry-after"] == "1"
        await d.start(int(config.decode[0].rsplit(":", 1)[1]))
        await until_status(f"{base}/ready", 200)
        assert await token_ids(client) == tokens_of(PROMPT, 4)
    await d.close()


async def test_latencies_and_outcomes_are_counted() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    async with running_cluster([p], [d]) as client:
        await token_ids(client)
        base = base_of(client)
        assert await metric(base, "vllm:time_to_first_token_seconds_count") == [1]
        assert await metric(base, "vllm:inter_token_latency_seconds_count") == [3]
        assert await metric(base, "vllm:e2e_request_latency_seconds_count") == [1]
        assert await metric(base, "vllm:request_success_total", finished_reason="length") == [1]
        assert await metric(base, "vllm:prompt_tokens_total", role="proxy") == [len(PROMPT)]
        assert await metric(base, "vllm:generation_tokens_total", role="proxy") == [4]
        assert await metric(base, "vllm:num_requests_running", role="proxy") == [0]
        assert await metric(base, "vllm:num_requests_waiting", role="proxy") == [0]
        labels = {"policy": "prefix_aware", "outcome": "ok"}
        assert await metric(base, "tandem_proxy_node_requests_total", node="p0", **labels) == [1]
        assert await metric(base, "tandem_proxy_node_requests_total", node="d0", **labels) == [1]


async def until_first_token(client: openai.AsyncOpenAI) -> None:
    base = base_of(client)

    async def has_come() -> bool:
        return await metric(base, "vllm:time_to_first_token_seconds_count") == [1]

    await until(has_come)


@pytest.mark.parametrize("stage", ["prefill", "decode", "stream"])
async def test_a_client_that_leaves_frees_both_nodes(stage: str) -> None:
    p = ScriptedNode("p", "prefill", hang_at=0 if stage == "prefill" else None)
    d = ScriptedNode("d", hang_at={"decode": 0, "stream": 2}.get(stage))
    async with running_cluster([p], [d]) as client:
        asking = asyncio.create_task(token_ids(client))
        await (p if stage == "prefill" else d).hanging.wait()
        if stage == "stream":
            await until_first_token(client)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)

        async def is_free() -> bool:
            # Without P's answer the proxy knows only its own label of the prefill.
            names = {"prefill": p.requests[0].request_id, "decode": "p-1"}
            released = [("p-incarnation", names[stage], "abort")] if stage in names else []
            cut = (1, 0) if stage == "prefill" else (0, 1)
            return (p.num_cut, d.num_cut) == cut and p.released == released

        await until(is_free)
        assert (p.num_open, d.num_open) == (0, 0)


async def test_a_client_that_leaves_the_queue_is_never_on_a_node() -> None:
    d = ScriptedNode("d", hang_at=1)
    async with running_cluster([], [d], max_concurrent_requests=1) as client:
        base = base_of(client)

        async def has_waiting(count: int) -> bool:
            return await metric(base, "tandem_proxy_waiting_requests") == [count]

        asked = [asyncio.create_task(token_ids(client))]
        await d.hanging.wait()
        for count in (1, 2):
            asked.append(asyncio.create_task(token_ids(client)))
            await until(partial(has_waiting, count))
        asked[1].cancel()
        await until(partial(has_waiting, 1))
        d.go_on.set()
        assert [await asked[0], await asked[2]] == [tokens_of(PROMPT, 4)] * 2
        assert await metric(base, "tandem_proxy_waiting_requests") == [0]
    assert (len(d.requests), d.num_cut) == (2, 0)
