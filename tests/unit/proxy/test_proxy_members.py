"""Nodes that register with a proxy: canaries, leases, leaving, several proxies, bad callers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from engine.errors import (
    AuthenticationError,
    ConfigError,
    EngineGenerateError,
    InvalidRequestError,
    TandemError,
)
from proxy import members
from proxy.config import ProxyConfig
from serving.config import load_config
from serving.rpc.channel import ProvingChannel
from serving.rpc.node_http import parse_node_url, resolve_grpc_address
from serving.rpc.pb import node_pb2 as pb
from serving.rpc.pb.node_pb2_grpc import MembershipStub
from serving.rpc.registration import Introduction, Registration
from tests.support.api.node_double import (
    ASK,
    IDS,
    PROMPT,
    ScriptedNode,
    client_of,
    fetch,
    running_nodes,
    running_proxy,
    tokens_of,
    until,
    until_status,
    until_used,
)


def open_proxy(**options: object) -> ProxyConfig:
    """The options of a proxy that knows no node but those that register."""
    given = {"port": 0, "grpc_port": 0, "drain_timeout": 0.5, **options}
    return load_config(ProxyConfig, None, given)


@asynccontextmanager
async def registered(
    node: ScriptedNode, *proxies: str, token: str | None = None
) -> AsyncIterator[Registration]:
    """A started double that keeps itself known to these proxies until the block ends."""
    introduction = Introduction(node.engine_id, node.kind, node.url)
    registration = Registration(introduction, token=token, tls=None)
    registration.register_with(proxies)
    try:
        yield registration
    finally:
        await registration.leave()


@asynccontextmanager
async def cluster_of(*nodes: ScriptedNode) -> AsyncIterator[str]:
    """Started nodes of which a started proxy, whose URL this is, knows nothing yet."""
    async with running_nodes(*nodes), running_proxy(open_proxy()) as base:
        yield base


async def stages(base: str) -> dict[str, str]:
    """By label, as the status page has them."""
    status = msgspec.json.decode((await fetch(f"{base}/status"))[1])
    return {node["label"]: node["stage"] for node in status["nodes"]}


async def until_stages(base: str, **wanted: str) -> None:
    async def are_reached() -> bool:
        return await stages(base) == wanted

    await until(are_reached)
    if wanted.get("d0") == "serving":
        await until_status(f"{base}/ready", 200)


async def test_nodes_register_are_warmed_by_a_hand_over_and_serve() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    async with running_nodes(p, d), running_proxy(open_proxy()) as base:
        async with registered(p, base), registered(d, base):
            await until_stages(base, p0="serving", d0="serving")
            # A canary is a prompt of the proxy's own, pulled by D from P.
            pulls = [it.kv_transfer_params for it in d.requests if it.kv_transfer_params]
            assert pulls[0].remote_engine_id == p.engine_id
            assert all(it.request_id.startswith("canary-") for it in (*p.requests, *d.requests))
            async with client_of(base) as client:
                answer = await client.completions.create(**ASK, extra_body=IDS)
            told: Any = answer.choices[0].model_extra
            assert told["token_ids"] == tokens_of(PROMPT, 4)
            _, ready = await fetch(f"{base}/ready")
            assert msgspec.json.decode(ready)["nodes"] == {"p0": "serving", "d0": "serving"}
        await until_stages(base)


async def test_a_decode_node_alone_is_warmed_by_a_prompt() -> None:
    d = ScriptedNode("d")
    async with running_nodes(d), running_proxy(open_proxy()) as base, registered(d, base):
        await until_stages(base, d0="serving")
        assert [it.kv_transfer_params for it in d.requests] == [None]


async def test_a_node_whose_canary_fails_gets_no_request_until_one_works() -> None:
    bad, d = ScriptedNode("bad", error=EngineGenerateError("broken")), ScriptedNode("d")
    async with cluster_of(d, bad) as base, registered(d, base), client_of(base) as client:
        await until_stages(base, d0="serving")
        async with registered(bad, base):
            await until_stages(base, d0="serving", d1="warming")
            await until(lambda: has_problem(base, "broken"))
            for _ in range(4):
                await client.completions.create(**ASK)
            assert all(it.request_id.startswith("canary-") for it in bad.requests)
            bad.error = None
            await until_stages(base, d0="serving", d1="serving")


async def has_problem(base: str, words: str) -> bool:
    return words in (await fetch(f"{base}/status"))[1]


async def test_a_prefill_node_from_which_nobody_can_pull_does_not_serve() -> None:
    p, d = ScriptedNode("p", "prefill", gives_params=False), ScriptedNode("d")
    async with cluster_of(p, d) as base, registered(p, base), registered(d, base):
        await until_stages(base, p0="warming", d0="serving")
        async with client_of(base) as client:
            await client.completions.create(**ASK)
        assert d.requests[-1].kv_transfer_params is None


async def test_a_node_that_leaves_finishes_what_it_has_and_gets_nothing_new() -> None:
    d, other = ScriptedNode("d"), ScriptedNode("other")
    async with (
        cluster_of(d, other) as base,
        registered(d, base) as registration,
        client_of(base) as client,
    ):
        await until_stages(base, d0="serving")
        d.hang_at = 2
        asked = asyncio.create_task(client.completions.create(**ASK, extra_body=IDS))
        await d.hanging.wait()
        async with registered(other, base):
            await until_stages(base, d0="serving", d1="serving")
            await registration.leave()
            assert (await stages(base))["d0"] == "leaving"
            for _ in range(4):
                await client.completions.create(**ASK)
            assert len(d.requests) == 2  # the canary, and the one under way
            d.go_on.set()
            told: Any = (await asked).choices[0].model_extra
            assert told["token_ids"] == tokens_of(PROMPT, 4)
            await until_stages(base, d1="serving")


async def test_a_prompt_whose_decode_node_leaves_meanwhile_is_not_computed_again() -> None:
    p, d, other = ScriptedNode("p", "prefill"), ScriptedNode("d"), ScriptedNode("other")
    async with cluster_of(p, d, other) as base, registered(p, base), client_of(base) as client:
        async with registered(d, base) as registration:
            await until_stages(base, p0="serving", d0="serving")
            num_canaries = len(p.requests)
            p.hang_at = 0
            asked = asyncio.create_task(client.completions.create(**ASK, extra_body=IDS))
            await p.hanging.wait()
            p.hang_at = None
            await registration.leave()
        async with registered(other, base):
            await until_stages(base, p0="serving", d0="leaving", d1="serving")
            p.go_on.set()
            told: Any = (await asked).choices[0].model_extra
            assert told["token_ids"] == tokens_of(PROMPT, 4)
            mine = [it for it in p.requests[num_canaries:] if "canary" not in it.request_id]
            assert len(mine) == 1
            asked_of_other = other.requests[-1]
            assert "canary" not in asked_of_other.request_id
            assert asked_of_other.kv_transfer_params is not None


async def test_a_node_that_is_lost_is_forgotten_after_its_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(members, "LEASE_S", 0.5)
    d = ScriptedNode("d")
    async with running_proxy(open_proxy()) as base:
        async with running_nodes(d), registered(d, base) as registration:
            await until_stages(base, d0="serving")
            # As kill -9 does: nobody says a word.
            for link in registration._links.values():
                link._task.cancel()
            registration._links.clear()
        await until_stages(base)


async def test_another_life_on_the_same_address_is_warmed_anew() -> None:
    d = ScriptedNode("d")
    async with running_proxy(open_proxy()) as base:
        await d.start()
        async with registered(d, base):
            await until_stages(base, d0="serving")
        port = d.port
        await d.close()
        again = ScriptedNode("again")
        await again.start(port)
        async with registered(again, base):
            await until_stages(base, d0="serving")
            assert len(again.requests) == 1
        await again.close()


async def test_several_proxies_know_the_same_nodes_and_a_new_one_learns_them() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    async with (
        cluster_of(p, d) as one,
        running_proxy(open_proxy()) as late,
        registered(p, one, late),
        registered(d, one) as registration,
    ):
        await until_stages(one, p0="serving", d0="serving")
        await until_stages(late, p0="warming")
        registration.register_with([one, late])
        await until_stages(late, p0="serving", d0="serving")
        registration.register_with([late])
        await until_stages(one, p0="serving")


async def test_a_node_of_the_options_that_registers_too_is_there_once() -> None:
    d = ScriptedNode("d")
    async with running_nodes(d), running_proxy(open_proxy(decode=(d.url,))) as base:
        await until_used(base, 1)
        async with registered(d, base) as registration:
            await until(lambda: is_told(registration, "serving"))
            assert await stages(base) == {"d0": "serving"}


async def is_told(registration: Registration, stage: str) -> bool:
    return set(registration.stages.values()) == {stage}


async def test_members_need_the_token() -> None:
    d = ScriptedNode("d", token="secret")
    async with running_nodes(d), running_proxy(open_proxy(cluster_token="secret")) as base:
        async with registered(d, base, token="secret"):
            await until_stages(base, d0="serving")
        for token in ("other", None):
            with pytest.raises((AuthenticationError, TandemError)):
                await join(base, token, engine_id="x", kind="decode", url="grpc://127.0.0.1:1")
        await until_stages(base)


async def join(base: str, token: str | None, **fields: str) -> pb.JoinReply:
    address = await resolve_grpc_address(parse_node_url(base), timeout_s=5.0)
    channel = ProvingChannel(address, token=token)
    try:
        call = MembershipStub(channel.grpc).Join  # type: ignore[no-untyped-call]
        reply: pb.JoinReply = await channel.call(call, pb.JoinRequest(**fields), 5.0)
        return reply
    finally:
        await channel.close()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"engine_id": "", "kind": "decode", "url": "grpc://127.0.0.1:1"}, "cannot join so"),
        ({"engine_id": "x", "kind": "proxy", "url": "grpc://127.0.0.1:1"}, "cannot join so"),
        ({"engine_id": "x", "kind": "decode", "url": "127.0.0.1:1"}, "cannot join so"),
        ({"engine_id": "x", "kind": "decode", "url": "http://127.0.0.1:1"}, "its gRPC port"),
        ({"engine_id": "x" * 300, "kind": "decode", "url": "grpc://h:1"}, "cannot join so"),
    ],
)
async def test_a_bad_introduction_is_refused(fields: dict[str, str], words: str) -> None:
    async with running_proxy(open_proxy()) as base:
        with pytest.raises(InvalidRequestError, match=words):
            await join(base, None, **fields)
        assert await stages(base) == {}


async def test_members_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(members, "MAX_MEMBERS", 2)
    async with running_proxy(open_proxy()) as base:
        for number in range(2):
            url = f"grpc://127.0.0.1:{number + 1}"
            await join(base, None, engine_id=f"x{number}", kind="decode", url=url)
        with pytest.raises(TandemError, match="2 nodes are registered already"):
            await join(base, None, engine_id="y", kind="decode", url="grpc://127.0.0.1:9")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"grpc_port": None}, "--decode URL, or --grpc-port"),
        ({"host": "0.0.0.0"}, "listens on 0.0.0.0: give --cluster-token"),
        ({"api_key": "k"}, "has API keys: give --cluster-token"),
    ],
)
def test_who_may_register_must_be_clear(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_proxy(**options)


async def test_a_proxy_without_the_port_serves_the_nodes_of_its_options_alone() -> None:
    d = ScriptedNode("d")
    async with running_nodes(d):
        config = open_proxy(grpc_port=None, decode=(d.url,))
        async with running_proxy(config) as base:
            await until_status(f"{base}/ready", 200)
            assert (await fetch(f"{base}/node_info"))[0] == 404
