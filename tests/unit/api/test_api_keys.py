"""Many API keys through a real proxy: who gets in, how much, and what tenants see of each other."""

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.errors import ConfigError
from proxy.config import ProxyConfig
from serving.config import load_config
from tests.support.api.node_double import (
    ScriptedNode,
    cluster_config,
    metric,
    running_nodes,
    running_proxy,
    until,
    until_status,
)

A, B, ROOT = "key-of-a-0123456789", "key-of-b-0123456789", "key-of-root-0123456789"
ASK: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}


def entry(name: str, key: str, **policy: object) -> dict[str, object]:
    return {"name": name, "key": key, **policy}


def write(path: Path, *keys: Mapping[str, object]) -> Path:
    """As operators should: the file changes at once."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps({"keys": keys}))
    part.rename(path)
    return path


@asynccontextmanager
async def guarded(path: Path | None, *nodes: ScriptedNode, **options: object) -> AsyncIterator[str]:
    """Base URL of a proxy with a file of keys, or open to all."""
    async with running_nodes(*nodes):
        options["api_keys_file"] = None if path is None else str(path)
        config = cluster_config([], nodes, **options)
        async with running_proxy(config) as base:
            await until_status(f"{base}/ready", 200)
            yield base


async def ask(base: str, key: str | None, **changes: object) -> tuple[int, Mapping[str, str], Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{base}/v1/completions", json={**ASK, **changes}, headers=headers) as reply,
    ):
        return reply.status, reply.headers, await reply.json()


async def status_of(base: str, key: str | None, **changes: object) -> int:
    return (await ask(base, key, **changes))[0]


async def test_each_key_opens_and_nothing_else_does(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(B.encode()).hexdigest()
    path = write(tmp_path / "keys", entry("a", A), {"name": "b", "sha256": sha256})
    async with guarded(path, ScriptedNode("d"), api_key=ROOT) as base:
        for key in (A, B, ROOT):
            assert await status_of(base, key) == 200
        for wrong in (None, "", A[:-1], A + "x", A.upper(), sha256, "a", f"{A} {B}", "\xe9" * 20):
            assert await status_of(base, wrong) == 401, wrong
        assert await status_of(f"{base}/v1/completions?api_key={A}#", None) in (401, 404)


async def test_a_key_may_end_in_any_letter(tmp_path: Path) -> None:
    """The last byte of "\xe0" in UTF-8 is a space in Latin-1, as which headers arrive."""
    key, single = "key-for-caff\xe9-e-citt\xe0", "\u0145-key-of-nobody-but-\u0160\xe0"
    path = write(tmp_path / "keys", entry("a", key))
    async with guarded(path, ScriptedNode("d"), api_key=single) as base:
        for known in (key, single):
            assert await status_of(base, known) == 200
            assert await status_of(base, known[:-1]) == 401


async def test_a_changed_file_counts_at_once_and_a_broken_one_not_at_all(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "keys", entry("a", A))

    async def opens(key: str) -> bool:
        return await status_of(base, key) == 200

    async def is_shut(key: str) -> bool:
        return await status_of(base, key) == 401

    async with guarded(path, ScriptedNode("d")) as base:
        write(path, entry("b", B))
        await until(lambda: opens(B))
        assert await is_shut(A), "a key that is gone is gone when the new one is there"
        broken = [
            b"",
            b"keys: [",
            f"keys:\n- name: c\n  key: {A}\n bad: indent {A}\n".encode(),
            b"\x00\xff",
            json.dumps({"keys": [entry("c", A), entry("c", "another-key-0123456789")]}).encode(),
            json.dumps({"keys": [entry("c", A), entry("d", A)]}).encode(),
            json.dumps({"keys": [entry("c", "short")]}).encode(),
            json.dumps({"keys": [entry("c", A, requests_per_minute=0)]}).encode(),
            json.dumps({"keys": [entry("c", A, limit=5)]}).encode(),
            json.dumps({"keys": [{"name": "c"}]}).encode(),
        ]
        capfd.readouterr()
        for content in broken:
            path.write_bytes(content)
            await until_logged(capfd, "API keys stay as they were")
            assert await opens(B) and await is_shut(A), content
        path.unlink()
        await until_logged(capfd, "No such file")
        assert await opens(B)
        write(path, entry("a", A))
        await until(lambda: opens(A))
        assert await is_shut(B)


async def test_a_client_that_reads_nothing_keeps_no_place(tmp_path: Path) -> None:
    """A place ends with the last token, and not with the last byte that the client has read."""
    path = write(tmp_path / "keys", entry("a", A), entry("b", B))
    options: dict[str, object] = {"max_concurrent_requests": 2, "queue_timeout": 10.0}
    async with guarded(path, ScriptedNode("d"), **options) as base:
        readers = [await unread(base, B, stream=True, n=2, max_tokens=4000) for _ in range(4)]
        for _ in range(3):
            assert await status_of(base, A) == 200
        await until_idle(base)
        for _, writer in readers:
            writer.close()


async def until_idle(base: str) -> None:
    async def is_idle() -> bool:
        return await metric(base, "tandem_proxy_waiting_requests") == [0.0]

    await until(is_idle)


async def unread(
    base: str, key: str, **changes: object
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection that asks and does not read."""
    host, port = base.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=256)
    writer.transport.pause_reading()  # type: ignore[attr-defined]
    body = json.dumps({**ASK, **changes}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return reader, writer


async def until_logged(capfd: pytest.CaptureFixture[str], text: str) -> None:
    """Waits for a line of the log; no line may hold a key."""
    seen = ""

    async def is_there() -> bool:
        nonlocal seen
        seen += "".join(capfd.readouterr())
        return text in seen

    await until(is_there)
    assert A not in seen and B not in seen


@pytest.mark.parametrize(
    "content",
    ["", "keys: [{name: x, key: 0123456789abcdef, sha256: ''}]", "keys: [{name: 'a b', key: k}]"],
)
async def test_a_proxy_does_not_start_with_a_broken_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys"
    path.write_text(content)
    with pytest.raises(ConfigError, match="keys"):
        async with guarded(path, ScriptedNode("d")):
            pass


async def test_requests_per_minute(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A, requests_per_minute=3), entry("b", B))
    node = ScriptedNode("d")
    async with guarded(path, node) as base:
        left = []
        for _ in range(3):
            status, headers, _ = await ask(base, A)
            assert status == 200
            assert headers["x-ratelimit-limit-requests"] == "3"
            left.append(headers["x-ratelimit-remaining-requests"])
        assert left == ["2", "1", "0"]
        status, headers, body = await ask(base, A)
        assert status == 429 and body["error"]["type"] == "rate_limit_error"
        assert "requests_per_minute" in body["error"]["message"]
        # A third of a minute brings the next one.
        assert 1 <= int(headers["retry-after"]) <= 20
        assert re.fullmatch(r"5\d(\.\d)?s|1m0s", headers["x-ratelimit-reset-requests"])
        assert "x-request-id" in headers
        assert await status_of(base, B) == 200, "others are not held up"
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {A}"}) as session:
            for _ in range(5):
                async with session.get(f"{base}/v1/models") as reply:
                    assert reply.status == 200, "asking for models costs nothing"
        assert len(node.requests) == 4
        outcomes = {"admitted": 3, "requests_per_minute": 1}
        for outcome, count in outcomes.items():
            name = "tandem_proxy_key_requests_total"
            assert await metric(base, name, key="a", outcome=outcome) == [count]


async def test_tokens_per_minute_count_prompt_and_answer(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A, tokens_per_minute=20))
    async with guarded(path, ScriptedNode("d")) as base:
        _, headers, _ = await ask(base, A)
        assert headers["x-ratelimit-remaining-tokens"] in ("13", "14")
        # What is left is less than this takes: it is served, and the debt must be waited off.
        assert await status_of(base, A, max_tokens=40) == 200
        status, headers, body = await ask(base, A)
        assert status == 429 and "tokens_per_minute" in body["error"]["message"]
        # 3 + 4 + 3 + 40 of 20 were taken: 31 tokens at 20 a minute.
        assert 85 <= int(headers["retry-after"]) <= 94
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        name = "tandem_proxy_key_tokens_total"
        assert await metric(base, name, key="a", kind="generated") == [44]
        assert await metric(base, name, key="a", kind="prompt") == [6]


async def test_several_choices_count_one_prompt(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A, tokens_per_minute=1000))
    async with guarded(path, ScriptedNode("d")) as base:
        _, _, body = await ask(base, A, n=5)
        total = body["usage"]["total_tokens"]
        name = "tandem_proxy_key_tokens_total"
        assert sum(await metric(base, name, key="a")) == total == 3 + 5 * 4


async def test_concurrent_requests_end_with_their_callers(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A, max_concurrent_requests=2))
    node = ScriptedNode("d", hang_at=1)
    async with guarded(path, node) as base:
        running = [asyncio.create_task(ask(base, A)) for _ in range(2)]
        await until(lambda: has(node, 2))
        status, headers, _ = await ask(base, A)
        assert (status, headers["retry-after"]) == (429, "1")
        running[0].cancel()
        await until(lambda: has(node, 1))
        running.append(asyncio.create_task(ask(base, A)))
        await until(lambda: has(node, 2))
        node.go_on.set()
        assert [(await it)[0] for it in running[1:]] == [200, 200]


async def has(node: ScriptedNode, count: int) -> bool:
    return node.num_open == count


async def test_tenants_take_turns_when_the_cluster_is_full(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A), entry("b", B))
    node = ScriptedNode("d", hang_at=1)
    async with guarded(path, node, max_concurrent_requests=1) as base:
        flood = [asyncio.create_task(ask(base, A, prompt=[5])) for _ in range(8)]
        await until(lambda: has_waiting(base, 7))
        guest = asyncio.create_task(ask(base, B, prompt=[6]))
        await until(lambda: has_waiting(base, 8))
        node.go_on.set()
        assert {(await it)[0] for it in (*flood, guest)} == {200}
        # The flood came first, and still only what was begun or next in turn is before the guest.
        assert [it.prompt_token_ids for it in node.requests].index((6,)) <= 2


async def has_waiting(base: str, count: int) -> bool:
    return await metric(base, "tandem_proxy_waiting_requests") == [count]


async def test_no_client_can_name_the_salt_of_a_tenant(tmp_path: Path) -> None:
    c = "key-of-c-0123456789"
    path = write(
        tmp_path / "keys",
        entry("a", A, tenant="acme", isolate_cache=True),
        entry("b", B),
        entry("c", c, tenant="acme", isolate_cache=True),
    )
    node = ScriptedNode("d")

    async def salt(key: str, **changes: object) -> str | None:
        assert await status_of(base, key, **changes) == 200
        return node.requests[-1].cache_salt

    async with guarded(path, node) as base:
        mine = await salt(A)
        assert mine and mine == await salt(c), "one tenant, one world"
        assert await salt(B) is None, "others share what is nobody's"
        shared = await salt(B, cache_salt="x")
        own = await salt(A, cache_salt="x")
        assert own == await salt(c, cache_salt="x")
        # Whatever b names, it lands elsewhere: also the very digest, or what it is made of.
        guesses = [mine, own, "acme", "acme\0", "acme\0x", "\0acme"]
        heard = [await salt(B, cache_salt=guess) for guess in guesses]
        assert len({mine, own, shared, *heard}) == 3 + len(guesses)


async def test_a_key_may_hide_what_was_cached(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A, hide_cached_tokens=True), entry("b", B))
    node = ScriptedNode("d", num_cached=2)
    async with guarded(path, node, enable_routing_details=True) as base:
        told = [(await ask(base, key))[2]["usage"] for key in (A, B)]
    assert told[1]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert told[0].get("prompt_tokens_details") is None
    assert "routing" in told[1] and not {"routing", "kv_transfer"} & told[0].keys()


async def test_only_a_key_that_may_chooses_its_priority(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A), entry("b", B, client_priority=True))
    node = ScriptedNode("d")
    async with guarded(path, node) as base:
        status, _, body = await ask(base, A, priority=-5)
        assert status == 400 and body["error"]["param"] == "priority"
        assert await status_of(base, A, priority=0) == 200
        assert await status_of(base, B, priority=-5) == 200
    assert node.requests[-1].priority == -5


async def test_pages_of_allowed_origins_may_ask(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A, requests_per_minute=9))
    here, there = {"Origin": "https://here.example"}, {"Origin": "https://there.example"}
    preflight = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    options = {"allowed_origins": ('["https://here.example"]',)}
    async with (
        guarded(path, ScriptedNode("d"), **options) as base,
        aiohttp.ClientSession() as session,
    ):
        url = f"{base}/v1/completions"
        async with session.options(url, headers={**here, **preflight}) as reply:
            assert reply.status == 200, "a browser sends no key with its question"
            assert reply.headers["access-control-allow-origin"] == here["Origin"]
        async with session.options(url, headers={**there, **preflight}) as reply:
            assert reply.status == 400 and "access-control-allow-origin" not in reply.headers
        for key, status in ((A, 200), ("wrong", 401)):
            auth = {"Authorization": f"Bearer {key}"}
            async with session.post(url, json=ASK, headers={**auth, **here}) as reply:
                assert reply.status == status
                assert reply.headers["access-control-allow-origin"] == here["Origin"]
                assert (
                    "x-ratelimit-remaining-requests"
                    in (reply.headers["access-control-expose-headers"])
                )


@pytest.mark.parametrize("has_keys", [True, False])
async def test_a_browser_that_asks_first_is_told_which_option_lets_pages_in(
    tmp_path: Path, has_keys: bool
) -> None:
    path = write(tmp_path / "keys", entry("a", A)) if has_keys else None
    preflight = {"Origin": "https://here.example", "Access-Control-Request-Method": "POST"}
    async with guarded(path, ScriptedNode("d")) as base, aiohttp.ClientSession() as session:
        url = f"{base}/v1/completions"
        async with session.options(url, headers=preflight) as reply:
            assert reply.status == (401 if has_keys else 405)
            assert "--allowed-origins" in (await reply.json())["error"]["message"]
        async with session.options(url) as reply:
            assert "--allowed-origins" not in await reply.text()


@pytest.mark.parametrize("origin", ["example.com", "https://a/path", "https://", "ftp://x", ""])
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="is no origin"):
        load_config(ProxyConfig, None, {"decode": ("grpc://h:1",), "allowed_origins": (origin,)})
