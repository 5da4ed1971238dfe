"""Replies of a proxy that all may read, in good times and bad, name no address, host or path."""

import re
import socket
from pathlib import Path

import aiohttp
import pytest

from proxy.config import ProxyConfig
from tests.support.api.node_double import (
    ScriptedNode,
    base_of,
    fetch,
    running_cluster,
    running_nodes,
    running_proxy,
    until_status,
)

OPEN = ("/", "/health", "/live", "/ready", "/ping", "/load", "/metrics", "/openapi.json")
ROOT = str(Path(__file__).parents[3])
DEAD = "http://127.0.0.1:1"
TELLING = re.compile(
    r"\d+\.\d+\.\d+\.\d+|localhost|[\w.-]+:\d{4,5}\b|\w+://(?!www\.w3\.org/)|/(?:tmp|home|root|usr)/|"
    + "|".join(map(re.escape, (ROOT, socket.gethostname())))
)


async def replies(base: str, *extra: tuple[str, object]) -> dict[str, str]:
    """Open routes, and what typical requests get, by what was asked; `extra`: path and body."""
    asked = {path: (await fetch(base + path))[1] for path in OPEN}
    completion = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2}
    bodies = [
        ("/v1/completions", completion),
        ("/v1/completions", {**completion, "stream": True}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/completions", {**completion, "model": "another"}),
        ("/v1/completions", "no object"),
        ("/nowhere", {}),
        *extra,
    ]
    async with aiohttp.ClientSession() as session:
        for path, body in bodies:
            async with session.post(base + path, json=body) as reply:
                asked[f"{path} {body}"] = await reply.text()
    return asked


def check(asked: dict[str, str]) -> None:
    told = {path: found[0] for path, text in asked.items() if (found := TELLING.search(text))}
    assert not told, told


async def test_a_cluster_at_work() -> None:
    async with running_cluster([ScriptedNode("p")], [ScriptedNode("d")]) as client:
        base = base_of(client)
        asked = await replies(base)
        check(asked)
        metrics = (await fetch(f"{base}/metrics"))[1]
        check({"/metrics": metrics})
        assert 'node="p0"' in metrics and 'node="d0"' in metrics


async def test_no_node_was_ever_there() -> None:
    async with running_proxy(ProxyConfig(prefill=(DEAD,), decode=(DEAD,), port=0)) as base:
        check(await replies(base))


@pytest.mark.parametrize("gone", ["p", "d", "both"])
async def test_nodes_go_away(gone: str) -> None:
    p, d = ScriptedNode("p"), ScriptedNode("d")
    async with running_nodes(p, d):
        config = ProxyConfig(prefill=(p.url,), decode=(d.url,), port=0, first_token_timeout=2.0)
        async with running_proxy(config) as base:
            await until_status(f"{base}/ready", 200)
            for node in (p, d):
                if gone in (node.name, "both"):
                    await node.close()
            check(await replies(base))
            check(await replies(base))
