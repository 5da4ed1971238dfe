"""The status page in a real headless Chromium, in front of real nodes with a real hand-over."""

from pathlib import Path

import pytest

from proxy.config import ProxyConfig
from serving.config import KVEventsConfig
from tests.support.api.browser import CHROMIUM, browsing
from tests.support.api.node_double import client_of, running_proxy, until_status, until_used
from tests.support.nodes.cluster import Cluster, transfer_config

EVENTS = KVEventsConfig(enable_kv_cache_events=True)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")
async def test_the_page_shows_what_real_nodes_did(
    cluster: Cluster, model: Path, tmp_path: Path
) -> None:
    """A pull and its bytes, the arena by kind, hit rates and the lag of events."""
    p, d = await cluster.pair(
        model,
        served_model_name=("tiny",),
        enable_prefix_caching=True,
        kv_transfer_config=transfer_config(),
        kv_events_config=EVENTS,
    )
    config = ProxyConfig(prefill=(p.url,), decode=(d.url,), port=0)
    async with running_proxy(config) as base, client_of(base) as client:
        await until_status(f"{base}/ready", 200)
        await until_used(base, 2)
        for _ in range(2):
            await client.completions.create(model="tiny", prompt="one two three " * 9, max_tokens=9)
        async with browsing(tmp_path) as page:
            await page.open(f"{base}/")
            await page.until("document.querySelectorAll('#requests .time').length === 2")
            titles = await page.run(
                "[...document.querySelectorAll('.time i')].map(i => i.title.split(' ')[0])"
            )
            assert sorted({*titles}) == ["decode", "prefill", "transfer:"]
            assert "verified" in await page.run(
                "[...document.querySelectorAll('.time i')].map(i => i.title).join()"
            )
            text = await page.text()
            assert p.url in text and d.url in text and "KV events" in text
            assert "attention kept" in text and "states kept" in text
            assert await page.run("document.querySelectorAll('.badge.ok').length") == 2
            assert page.messages == []
