"""The status page in a real headless Chromium, in front of a real proxy and scripted nodes."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.errors import TandemError, UnavailableError
from proxy.status import MAX_LISTED, PAGE
from serving.rpc.messages import ArenaUse, NodeInfo
from tests.support.api.browser import CHROMIUM, Page, browsing
from tests.support.api.node_double import (
    ScriptedNode,
    client_of,
    cluster_config,
    fetch,
    running_nodes,
    running_proxy,
    until_status,
    until_used,
)
from tests.support.nodes.cluster import until
from tests.unit.api.test_api_keys import A, B, entry, write

KEY = "the-key-of-operators"
SHOWN = "document.querySelector('#verdict .word')?.innerText"
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium on this machine: apt-get install chromium"
)


@pytest.fixture(scope="module")
async def page(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Page]:
    """One tab for all tests; each opens its own proxy's page, so nothing is shared but the tab."""
    async with browsing(tmp_path_factory.mktemp("profile")) as made:
        yield made


@asynccontextmanager
async def cluster(*nodes: ScriptedNode, **options: object) -> AsyncIterator[str]:
    async with running_nodes(*nodes):
        prefill = [node for node in nodes if node.kind == "prefill"]
        decode = [node for node in nodes if node.kind == "decode"]
        async with running_proxy(cluster_config(prefill, decode, **options)) as base:
            await until_status(f"{base}/ready", 200)
            await until_used(base, len(nodes))
            yield base


class BusyNode(ScriptedNode):
    """A node that says of itself what a real one under load does."""

    def describe(self) -> NodeInfo:
        told = super().describe()
        fields = {name: getattr(told, name) for name in told.__struct_fields__}
        arena = ArenaUse(num_units=100, attention=21, idle_attention=17, states=12, idle_states=9)
        return NodeInfo(**{**fields, "arena": arena, "num_held": 3, "num_requests_loading": 2})


async def ask(base: str, key: str = "none", **changes: Any) -> None:
    async with client_of(base, key) as client:
        given = {"model": "tiny", "prompt": [5, 6, 7, 8], "max_tokens": 4, **changes}
        await client.completions.create(**given)


async def status(base: str, key: str | None = None) -> dict[str, Any]:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(f"{base}/status") as reply,
    ):
        return {"status": reply.status, **await reply.json()}


@needs_browser
async def test_one_look_says_that_all_is_well(page: Page, tmp_path: Path) -> None:
    """Verdict, nodes and a request's way; in both schemes, on a desk and on a phone."""
    nodes = [BusyNode("p", "prefill"), BusyNode("d"), BusyNode("d2")]
    async with cluster(*nodes) as base:
        await ask(base, extra_headers={"X-Request-Id": "my-own-name"})
        for dark, width in ((False, 1280), (True, 390)):
            await page.open(f"{base}/", width=width, dark=dark)
            await page.until(f"{SHOWN} === 'Healthy'")
            text = await page.text()
            assert "1 of 1 prefill node and 2 of 2 decode nodes in use" in text
            assert all(node.url in text for node in nodes)
            assert "my-own-name" in text and "4 → 4 tokens" in text
            assert "attention in use 21" in text and "free 41 of 100 units" in text
            assert await page.run("document.title") == "✓ Healthy · Tandem"
            steps = await page.run("[...document.querySelectorAll('.time i')].map(i => i.title)")
            assert [step.split()[0] for step in steps] == ["prefill", "decode"]
            # Nothing is cut off at the side, however small the screen.
            wide = "document.documentElement.scrollWidth <= innerWidth"
            assert await page.run(wide), await page.run("document.documentElement.scrollWidth")
            colour = await page.run("getComputedStyle(document.body).backgroundColor")
            assert (int(re.findall(r"\d+", colour)[0]) < 60) is dark
            (tmp_path / f"{width}.png").write_bytes(await page.screenshot())
    assert {url.rpartition(":")[0] for url in page.requested if url.startswith("http")} == {
        "http://127.0.0.1"
    }
    assert page.messages == []


@needs_browser
async def test_one_look_says_what_is_wrong(page: Page) -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    async with cluster(p, d) as base:
        await page.open(f"{base}/")
        await page.until(f"{SHOWN} === 'Healthy'")
        p.ready = False
        await page.until(f"{SHOWN} === 'Degraded'")
        assert f"prefill node {p.url}: is not ready: draining" in await page.text()
        d.error = UnavailableError("gone")
        with pytest.raises(Exception, match="no node could serve"):
            await ask(base)
        await page.until("document.querySelector('#requests .fail')")
        await d.close()
        await page.until(f"{SHOWN} === 'Down'")
        assert "no decode node can be used" in await page.text()
    await page.until(f"{SHOWN} === 'No answer'")
    assert await page.run("document.body.classList.contains('stale')")


@needs_browser
async def test_a_node_that_rests_is_told_from_one_that_is_away(page: Page) -> None:
    p, d = ScriptedNode("p", "prefill", error=TandemError("broken")), ScriptedNode("d")
    async with cluster(p, d) as base:
        for _ in range(3):
            await ask(base)  # D computes the prompt instead
        await page.open(f"{base}/")
        await page.until("document.querySelector('.badge.rests')?.innerText === 'rests'")
        assert await page.run("[...document.querySelectorAll('.badge.ok')].length") == 1
    page.messages.clear()


@needs_browser
async def test_nothing_from_outside_becomes_markup(page: Page) -> None:
    """Names of models, keys and requests, and what nodes say of themselves."""
    # Without spaces, which would not survive as a request's id.
    evil = "<img/src=x/onerror=window.hit=1><script>window.hit=1</script>\"'`${window.hit=1}"
    p = ScriptedNode("p", "prefill", model=evil)
    d = ScriptedNode("d", model=evil)
    p.name = evil
    async with cluster(p, d) as base:
        await ask(base, model=evil, extra_headers={"X-Request-Id": evil})
        p.error = UnavailableError(evil)
        await ask(base, model=evil, extra_headers={"X-Request-Id": evil})
        await page.open(f"{base}/")
        await page.until("document.querySelectorAll('#requests .row').length === 3")
        text = await page.text()
        # Twice more while P rests: its card and the verdict tell what it failed with.
        assert text.count(evil) in (3, 5), "the model, and the id of each request"
        assert await page.run("window.hit") is None
        assert await page.run("document.querySelectorAll('img, body script').length") == 1
        # And if some day it did: the page's policy runs no script but its own, and loads nothing.
        await page.run("document.body.insertAdjacentHTML('beforeend', '<b onclick=window.hit=2>')")
        await page.run("document.querySelector('b[onclick]').click()")
        assert await page.run("window.hit") is None
        # The browser reports it a moment later.
        await until(lambda: any("Content Security Policy" in said for said in page.messages))
    page.messages.clear()


@needs_browser
async def test_the_page_asks_for_the_key_and_keeps_it_in_the_tab(page: Page) -> None:
    async with cluster(ScriptedNode("d"), api_key=KEY) as base:
        await page.open(f"{base}/")
        await page.until(f"{SHOWN} === 'Locked'")
        for key, after in (("wrong", "Locked"), (KEY, "Healthy")):
            await page.run(f"document.querySelector('#key').value = '{key}'")
            await page.run("document.querySelector('#ask').requestSubmit()")
            await page.until(f"{SHOWN} === '{after}'")
        assert await page.run("localStorage.length") == 0
        assert await page.run("document.cookie") == ""
        assert KEY not in await page.run("document.documentElement.outerHTML")
        assert KEY not in await page.run("location.href")
        await page.run("document.querySelector('#forget').click()")
        await page.until(f"{SHOWN} === 'Locked'")
        assert await page.run("sessionStorage.length") == 0
    page.messages.clear()  # the browser notes each 401


async def test_only_operators_see_what_all_others_do(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", entry("a", A), entry("ops", B, operator=True))
    async with cluster(ScriptedNode("d"), api_keys_file=str(path)) as base:
        await ask(base, A)
        assert [(await status(base, key))["status"] for key in (None, A, B)] == [401, 403, 200]
        assert (await status(base, B))["requests"][0]["key"] == "a"
        code, text = await fetch(f"{base}/")
        assert code == 200 and text == PAGE.read_text()
        assert A not in text and "grpc://" not in text


async def test_the_list_is_bounded_and_holds_no_prompt() -> None:
    secret = [271, 272, 273, 274]
    async with cluster(ScriptedNode("p", "prefill"), ScriptedNode("d")) as base:
        await asyncio.gather(*(ask(base, prompt=secret) for _ in range(MAX_LISTED + 40)))
        told = await status(base)
        assert len(told["requests"]) == MAX_LISTED
        assert told["totals"] == {
            "requests": MAX_LISTED + 40,
            "failed": 0,
            "prompt_tokens": 4 * (MAX_LISTED + 40),
            "cached_tokens": 0,
            "tokens": 4 * (MAX_LISTED + 40),
        }
        assert str(secret)[1:-1] not in str(told["requests"])
        assert {len(it["visits"]) for it in told["requests"]} == {2}


async def test_a_request_s_way_is_told_in_order() -> None:
    p, d = ScriptedNode("p", "prefill", num_cached=3), ScriptedNode("d", num_cached=4, hang_at=2)
    async with cluster(p, d) as base:
        running = asyncio.create_task(ask(base))
        await d.hanging.wait()
        (under_way,) = (await status(base))["requests"]
        assert under_way["outcome"] == "" and under_way["visits"][1]["ended_s"] is None
        d.go_on.set()
        await running
        (told,) = (await status(base))["requests"]
    first, second = told["visits"]
    assert (first["kind"], first["node"]) == ("prefill", p.url)
    assert (second["kind"], second["node"]) == ("decode", d.url)
    assert 0 <= first["began_s"] <= first["ended_s"] <= second["began_s"] <= second["ended_s"]
    assert second["ended_s"] <= told["age_s"]
    assert second["kv_transfer"]["attention_bytes"] == 64
    assert (told["outcome"], told["tokens"]) == ("length", 4)


async def test_a_request_that_failed_on_a_node_says_where() -> None:
    p = ScriptedNode("p", "prefill", error=UnavailableError("gone"))
    async with cluster(p, ScriptedNode("d")) as base:
        await ask(base)
        (told,) = (await status(base))["requests"]
    assert [(it["kind"], it["outcome"]) for it in told["visits"]] == [
        ("prefill", "failed"),
        ("decode", "ok"),
    ]
    assert not told["failed"], "the client got its answer"
