"""Routing as clients and metrics see it: sessions, local prefills, details, hits, restarts."""

import asyncio
import gc

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.errors import KVTransferParamsError, TandemError
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.types import GenerateRequest
from proxy.routing.event_sources import EventSources
from proxy.routing.prefix_index import PrefixIndex
from proxy.routing.prompt import NodeHit, RoutedPrompt
from serving.kv_events.wire import GPU, BlockStored
from serving.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo
from tests.support.api.node_double import ASK, ScriptedNode, base_of, metric, running_cluster, until

EVENTS = KVEventsInfo(
    endpoint="tcp://127.0.0.1:1", hash_block_size=4, groups=(KVGroupInfo(kind="full_attention"),)
)


@pytest.mark.parametrize(
    ("headers", "body"),
    [
        ({"X-Session-ID": "s"}, {"user": "{i}"}),
        ({}, {"prompt_cache_key": "s", "user": "{i}"}),
        ({}, {"user": "s"}),
    ],
    ids=["header", "prompt_cache_key", "user"],
)
async def test_requests_of_one_session_meet(headers: dict[str, str], body: dict[str, str]) -> None:
    ds = [ScriptedNode(f"d{i}") for i in range(4)]
    async with running_cluster([], ds, routing_policy="session") as client:
        for i in range(8):
            extra = {key: value.format(i=i) for key, value in body.items()}
            await client.completions.create(**ASK, extra_headers=headers, extra_body=extra)
    assert sorted(len(d.requests) for d in ds) == [0, 0, 0, 8]
    # The label is the client's: nodes are not told.
    assert {r.session_id for d in ds for r in d.requests} == {None}


async def test_labels_that_are_no_text_name_no_session() -> None:
    d = ScriptedNode("d")
    async with running_cluster([], [d], routing_policy="session") as client:
        long, odd = {"user": "u" * 10_000}, {"user": {"a": 1}, "prompt_cache_key": 7}
        for body in (long, odd, {"user": ""}):
            await client.completions.create(**ASK, extra_body=body)
    assert len(d.requests) == 3


async def test_short_prompts_stay_on_d_below_the_threshold() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    async with running_cluster([p], [d], disagg_threshold="4") as client:
        await client.completions.create(**ASK)
        await client.completions.create(**{**ASK, "prompt": [1] * 4})
        name = "tandem_proxy_local_prefills_total"
        assert await metric(base_of(client), name, reason="below_threshold") == [1]
    assert [len(it.requests) for it in (p, d)] == [1, 2]
    assert d.requests[0].kv_transfer_params is None


async def test_the_reason_of_a_local_prefill_is_p_s_and_not_a_decode_node_s() -> None:
    name = "tandem_proxy_local_prefills_total"
    bad, good = ScriptedNode("d1", error=TandemError("bug")), ScriptedNode("d2")
    async with running_cluster([], [bad, good], routing_policy="round_robin") as client:
        for _ in range(2):
            await client.completions.create(**ASK)
        assert await metric(base_of(client), name, reason="no_prefill_node") == [3]
    no = KVTransferParamsError("no")
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d", refuses_params=no)
    async with running_cluster([p], [d]) as client:
        await client.completions.create(**ASK)
        assert await metric(base_of(client), name, reason="prefill_failed") == [1]


@pytest.mark.parametrize("is_told", [True, False])
async def test_the_reply_says_who_served_if_the_proxy_is_asked_to(is_told: bool) -> None:
    p, d = ScriptedNode("p", "prefill", num_lost_to_state=5), ScriptedNode("d")
    async with running_cluster([p], [d], enable_routing_details=is_told) as client:
        reply = await client.completions.create(**ASK)
        stream = await client.completions.create(
            **ASK, stream=True, stream_options={"include_usage": True}
        )
        usages = [chunk.usage async for chunk in stream]
    told = {
        "prefill": p.url,
        "decode": d.url,
        "reason": "no_events",
        "prefill_hit_tokens": 0,
        "decode_hit_tokens": 0,
        "prefix_tokens_lost_to_state": 5,
    }
    for usage in (reply.usage, usages[-1]):
        assert (usage.model_extra or {}).get("routing") == (told if is_told else None)


async def test_hits_are_counted_as_expected_and_as_they_were() -> None:
    p = ScriptedNode("p", "prefill", num_cached=2)
    d = ScriptedNode("d", num_cached=1, num_cached_of_pull=3)
    async with running_cluster([p], [d]) as client:
        await client.completions.create(**ASK)
        base = base_of(client)
        for kind, real in (("prefill", 2), ("decode", 3)):
            assert await metric(base, "tandem_proxy_hit_tokens_total", kind=kind) == [real]
            name = "tandem_proxy_predicted_hit_tokens_total"
            assert await metric(base, name, kind=kind) == [0]
        labels = {"policy": "prefix_aware", "reason": "no_events"}
        assert await metric(base, "tandem_proxy_routes_total", **labels) == [1]


async def test_what_is_expected_of_nodes_with_events_draws_equal_prompts() -> None:
    ps = [ScriptedNode(f"p{i}", "prefill", kv_events=EVENTS) for i in range(3)]
    ds = [ScriptedNode(f"d{i}", kv_events=EVENTS) for i in range(3)]
    # So long that its transfer outweighs a request that a node has reported and ended since.
    prompt = list(range(40)) * 75
    async with running_cluster(ps, ds) as client:
        for _ in range(4):
            await client.completions.create(**{**ASK, "prompt": prompt})
        base = base_of(client)
        assert await metric(base, "tandem_proxy_routes_total", reason="prefix") == [3]
        name = "tandem_proxy_predicted_hit_tokens_total"
        assert await metric(base, name, kind="prefill") == [3 * 2996]
        assert await metric(
            base, "tandem_proxy_overpredicted_hit_tokens_total", kind="prefill"
        ) == [3 * 2996]
    assert sorted(len(it.requests) for it in ps) == [0, 0, 4]
    assert sorted(len(it.requests) for it in ds) == [0, 0, 4]


async def test_a_burst_does_not_choose_one_d_while_p_still_computes() -> None:
    p = ScriptedNode("p", "prefill", hang_at=0)
    ds = [ScriptedNode("d1"), ScriptedNode("d2")]
    async with running_cluster([p], ds) as client:
        asking = [asyncio.create_task(client.completions.create(**ASK)) for _ in range(4)]

        async def are_there() -> bool:
            return p.num_open == 4

        await until(are_there)
        p.go_on.set()
        await asyncio.gather(*asking)
    assert [len(d.requests) for d in ds] == [2, 2]


async def test_a_long_answer_keeps_no_digests_of_its_prompt() -> None:
    def num_kept() -> int:
        return sum(type(each) is PrefixDigests for each in gc.get_objects())

    d = ScriptedNode("d", kv_events=EVENTS, hang_at=0)
    async with running_cluster([], [d]) as client:
        num_before = num_kept()
        asking = asyncio.create_task(client.completions.create(**ASK))
        await d.hanging.wait()
        assert num_kept() == num_before + 1
        go_on = d.go_on
        d.hang_at, d.go_on = 1, asyncio.Event()
        go_on.set()

        async def are_gone() -> bool:
            return num_kept() == num_before

        await until(are_gone)
        assert d.num_open == 1
        d.go_on.set()
        await asking


async def test_index_and_events_are_measured_by_node() -> None:
    d = ScriptedNode("d", kv_events=EVENTS)
    async with running_cluster([], [d]) as client:
        base = base_of(client)
        assert await metric(base, "tandem_proxy_index_entries", node="d0") == [0]
        for name in ("num_gaps_repaired_total", "num_gaps_lost_total", "lag_s", "is_synced"):
            assert len(await metric(base, f"tandem_proxy_kv_events_{name}", node="d0")) == 1


# --- nodes' own words on their events -----------------------------------------------------------


def told(engine_id: str, events: KVEventsInfo | None) -> NodeInfo:
    return NodeInfo(
        engine_id=engine_id,
        kind="decode",
        model_names=("tiny",),
        max_model_len=64,
        vocab_size=99,
        kv_events=events,
    )


def test_what_a_node_held_is_forgotten_with_its_incarnation() -> None:
    index, lost = PrefixIndex(), list[str]()
    sources = EventSources(index, lost.append)
    try:
        tokens = list(range(9))
        request = GenerateRequest(request_id="r", prompt_token_ids=tuple(tokens))
        hashes = tuple(PrefixDigests(PrefixHasher(4), tokens, None).boundaries()[1:])
        stored = BlockStored(hashes, None, tuple(tokens[:8]), 4, medium=GPU, group_idx=0)
        sources.follow("d", told("d-1", EVENTS))
        index.apply("d", [stored])
        sources.follow("d", told("d-1", EVENTS))
        assert index.hits(RoutedPrompt(request)) == {"d": NodeHit(8, 8)}
        sources.follow("d", told("d-2", EVENTS))
        assert (index.hits(RoutedPrompt(request)), lost) == ({}, ["d"])
        index.apply("d", [stored])
        assert index.hits(RoutedPrompt(request)) == {"d": NodeHit(8, 8)}
        assert sources.stats().keys() == {"d"}
        sources.follow("d", told("d-2", None))
        assert (index.hits(RoutedPrompt(request)), sources.stats()) == ({}, {})
    finally:
        sources.close()


def test_a_node_whose_events_cannot_be_followed_is_told_of_once() -> None:
    index = PrefixIndex()
    sources = EventSources(index, list[str]().append)
    deaf = msgspec.structs.replace(EVENTS, endpoint="nonsense")
    try:
        with capture_logs() as logs:
            for _ in range(3):
                sources.follow("d", told("d-1", deaf))
        assert [entry["log_level"] for entry in logs] == ["error"]
        assert (sources.stats(), index.num_entries) == ({}, {"d": 0})
        sources.follow("d", told("d-1", EVENTS))
        assert sources.stats().keys() == {"d"}
        sources.follow("d", told("d-1", deaf))
        assert (sources.stats(), index.num_entries) == ({}, {"d": 0})
    finally:
        sources.close()
