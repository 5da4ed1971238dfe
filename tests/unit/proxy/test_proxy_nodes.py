"""Which nodes the proxy finds, uses and refuses, and that it leaves nothing open."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import UnavailableError
from proxy.backends.tandem import TandemNode
from proxy.cluster.node import Node, NodeKind
from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from serving.config import load_config
from serving.http.server import HttpServer
from serving.process import wait_until
from serving.rpc.messages import NodeInfo
from serving.rpc.node_http import parse_node_url, resolve_grpc_address
from tests.support.api.node_double import (
    POLL_S,
    WAIT_S,
    ScriptedNode,
    client_of,
    cluster_config,
    fetch,
    running_cluster,
    running_nodes,
    running_proxy,
    until,
    until_status,
    until_used,
)
from tests.support.nodes.leaks import running_tasks

ANSWER = b'{"grpc_port": 4321, "engine_id": "d-1", "kind": "decode", "later": [1]}'


@asynccontextmanager
async def http_node(body: bytes, status: int = 200) -> AsyncIterator[str]:
    """Base URL of a node's HTTP port that answers /node_info like this."""

    async def node_info(request: Request) -> Response:
        assert "authorization" not in request.headers  # whoever answers may be anybody
        return Response(body, status)

    app = Starlette(routes=[Route("/node_info", node_info)])
    server = HttpServer(app, "127.0.0.1", 0, drain_timeout_s=1)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


async def resolved(url: str) -> str:
    return await resolve_grpc_address(parse_node_url(url), timeout_s=1.0)


async def test_an_http_url_leads_to_the_grpc_port() -> None:
    async with http_node(ANSWER) as url:
        assert await resolved(url) == "127.0.0.1:4321"


async def test_a_grpc_url_is_an_address_already() -> None:
    assert await resolved("grpc://[::1]:4321") == "[::1]:4321"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (ANSWER, 500),
        (ANSWER, 302),
        (b"hello", 200),
        (b'{"grpc_port": 0, "engine_id": "d", "kind": "decode"}', 200),
        (b"[" * 1_000_000, 200),
    ],
)
async def test_a_strange_answer_is_no_node(body: bytes, status: int) -> None:
    async with http_node(body, status) as url:
        with pytest.raises(UnavailableError):
            await resolved(url)


@pytest.mark.parametrize("talk", [b"", b"HTTP/1.1 200 OK\r\n"])
async def test_a_server_that_never_answers_is_given_up(talk: bytes) -> None:
    async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(talk)
        await reader.read()
        writer.close()

    async with await asyncio.start_server(mute, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UnavailableError, match="no answer"):
            await resolve_grpc_address(parse_node_url(f"http://127.0.0.1:{port}"), timeout_s=0.1)


@pytest.mark.parametrize("host", ["127.0.0.1", "no-such-host.invalid"])
async def test_a_node_that_is_down_is_no_matter_of_tls(host: str) -> None:
    """The client's library says `ssl:default` of every address that it cannot reach."""
    with pytest.raises(UnavailableError) as caught:
        await resolved(f"http://{host}:1")
    said = str(caught.value)
    assert said.startswith(f"http://{host}:1/node_info: cannot connect: ")
    assert "ssl" not in said.lower()


async def test_a_cluster_of_http_urls_serves() -> None:
    d = ScriptedNode("d")
    async with running_nodes(d):
        answer = b'{"grpc_port": %d, "engine_id": "d-1", "kind": "decode"}' % d.port
        async with http_node(answer) as url:
            config = load_config(ProxyConfig, None, {"decode": (url,), "port": 0})
            async with running_proxy(config) as base:
                await until_status(f"{base}/ready", 200)


@pytest.mark.parametrize("difference", [{"model": "other"}, {"vocab_size": 301}])
async def test_a_node_of_another_model_is_refused_with_both_named(
    difference: dict[str, object], capfd: pytest.CaptureFixture[str]
) -> None:
    first, odd = ScriptedNode("d1"), ScriptedNode("d2")
    for name, value in difference.items():
        setattr(odd, name, value)
    async with running_nodes(first, odd):
        config = cluster_config([], [first, odd])
        first_up = cluster_config([], [first])
        del first_up
        async with running_proxy(config) as base:
            await until_status(f"{base}/ready", 200)
            await until_used(base, 1)
            for _ in range(4):
                async with client_of(base) as client:
                    name = (await client.models.list()).data[0].id
                    await client.completions.create(model=name, prompt=[1], max_tokens=1)
    assert sorted([len(first.requests), len(odd.requests)]) == [0, 4]
    said = "".join(capfd.readouterr())
    assert "refused" in said
    assert "'tiny' with 300" in said
    assert f"{odd.model!r} with {odd.vocab_size}" in said


async def test_a_node_that_is_not_ready_gets_nothing() -> None:
    ready, draining = ScriptedNode("d1"), ScriptedNode("d2", ready=False)
    async with (
        running_nodes(ready, draining),
        running_proxy(cluster_config([], [ready, draining])) as base,
    ):
        await until_used(base, 1)
        draining.ready = True
        await until_used(base, 2)
        ready.ready = draining.ready = False
        await until_status(f"{base}/ready", 503)
        _, text = await fetch(f"{base}/ready")
    assert "no decode node is available" in text
    assert "127.0.0.1" not in text


async def test_an_answer_from_before_a_node_was_lost_does_not_bring_it_back() -> None:
    class Dying(ScriptedNode):
        def describe(self) -> NodeInfo:
            if node.is_available:
                node.set_problem("a request has lost it")
            return super().describe()

    dying = Dying("d")
    async with running_nodes(dying):
        worker = TandemNode(parse_node_url(dying.url), token=None, tls=None)
        node = Node(dying.url, NodeKind.DECODE, worker, label="d0")
        for is_lost in (False, True, False):
            assert (await node.refresh(WAIT_S) is None) == is_lost
            assert (node.problem == "a request has lost it") == is_lost
            node.set_problem("is away" if is_lost else None)
        await node.close()


async def test_the_proxy_names_the_nodes_that_it_waits_for() -> None:
    prefill, decode = ScriptedNode("p", kind="prefill"), ScriptedNode("d", ready=False)
    async with running_nodes(prefill, decode):
        proxy = ProxyServer(cluster_config([prefill], [decode]), poll_interval_s=POLL_S)
        assert proxy.missing()[-1] == "a model"
        await proxy.start()
        try:
            said = (f"{decode.url}: is not ready: draining",)
            assert await wait_until(lambda: proxy.missing() == said, WAIT_S)
            decode.ready = True
            assert await wait_until(lambda: not proxy.missing(), WAIT_S)
        finally:
            await proxy.close()


async def test_a_node_that_moves_to_another_port_is_found_again() -> None:
    d = ScriptedNode("d")
    port = {"now": 0}

    async def node_info(request: Request) -> Response:
        body = b'{"grpc_port": %d, "engine_id": "d-1", "kind": "decode"}' % port["now"]
        return Response(body)

    http = HttpServer(
        Starlette(routes=[Route("/node_info", node_info)]), "127.0.0.1", 0, drain_timeout_s=1
    )
    await http.start()
    async with running_nodes(d):
        port["now"] = d.port
        config = load_config(
            ProxyConfig, None, {"decode": (f"http://127.0.0.1:{http.port}",), "port": 0}
        )
        async with running_proxy(config) as base:
            await until_status(f"{base}/ready", 200)
            await d.close()
            await until_status(f"{base}/ready", 503)
            await d.start()
            port["now"] = d.port
            await until_status(f"{base}/ready", 200)
    await http.close()


async def test_nothing_is_left_open() -> None:
    async def one_life() -> None:
        p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
        async with running_cluster([p], [d]) as client:
            ask = {"model": "tiny", "prompt": [1], "max_tokens": 3}
            await client.completions.create(**ask)  # type: ignore[call-overload]
            d.hang_at = 1
            asking = asyncio.create_task(client.completions.create(**ask))  # type: ignore[call-overload]
            await d.hanging.wait()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

    await one_life()  # gRPC opens what it keeps for the process
    tasks, files = len(running_tasks()), len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        await one_life()

    async def is_as_before() -> bool:
        return len(running_tasks()) <= tasks and len(os.listdir("/proc/self/fd")) <= files

    await until(is_as_before)
