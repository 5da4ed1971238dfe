"""Cached tokens, as clients read them, are those that P and D did not compute or pull.

By hand: a prompt of 70 tokens, the same again, and one that goes on after its answer of 12:

    P     computed 70, and kept its state at 64 and at 70
    D     pulled 70, kept that state, and decoded up to 81 (the last token is never computed)
    same  P goes on from 64, as its last token must be computed; D has all 70 and pulls nothing
    more  P goes on from 70; of D's attention 80 tokens serve: a pull brings whole blocks of 16
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest

from proxy.config import ProxyConfig
from serving.node.server import NodeServer
from tests.e2e.test_multi_connector import both
from tests.e2e.test_prefix_cache_pd import prompt_of
from tests.support.api.node_double import client_of, running_proxy, until_status
from tests.support.cache.offload import forget
from tests.support.nodes.asking import REMOTE_DECODE
from tests.support.nodes.cluster import Cluster

PROMPT = list(prompt_of(70))
MORE = list(prompt_of(20, seed=8))
ANSWER = 12


@asynccontextmanager
async def proxy_of(p: NodeServer, d: NodeServer) -> AsyncIterator[openai.AsyncOpenAI]:
    """The client of a proxy that has found both nodes."""
    config = ProxyConfig(
        prefill=(p.url,),
        decode=(d.url,),
        port=0,
        drain_timeout=0.5,
        enable_prompt_tokens_details=True,
    )
    async with running_proxy(config) as url, client_of(url) as client:
        await until_status(f"{url}/ready", 200)
        yield client


class Reply:
    """Of one completion, streamed or not: its tokens, its usage and P's parameters for D."""

    def __init__(self, parts: list[Any]) -> None:
        choices = [part.choices[0] for part in parts if part.choices]
        self.token_ids = [token for c in choices for token in c.model_extra["token_ids"] or ()]
        usages = [part.usage for part in parts if part.usage]
        assert len(usages) == 1
        self.usage: openai.types.CompletionUsage = usages[0]
        self.params = parts[-1].model_extra.get("kv_transfer_params")

    @property
    def cached(self) -> int | None:
        assert self.usage.prompt_tokens_details is not None
        return self.usage.prompt_tokens_details.cached_tokens

    @property
    def on_p_and_d(self) -> tuple[int, int]:
        found = (self.usage.model_extra or {})["kv_transfer"]
        return found["prefill_cached_tokens"], found["decode_cached_tokens"]


async def ask(
    client: openai.AsyncOpenAI, prompt: list[int], *, stream: bool, **extra: object
) -> Reply:
    more: dict[str, Any] = {"stream_options": {"include_usage": True}} if stream else {}
    reply: Any = await client.completions.create(
        model=(await client.models.list()).data[0].id,
        prompt=prompt,
        max_tokens=ANSWER,
        temperature=0,
        stream=stream,
        extra_body={"return_token_ids": True, "ignore_eos": True, **extra},
        **more,
    )
    return Reply([part async for part in reply] if stream else [reply])


@pytest.mark.parametrize("stream", [False, True])
async def test_through_the_proxy(shared: Cluster, model: Path, stream: bool) -> None:
    """`cached_tokens` are P's, who has computed the rest; `kv_transfer` names both."""
    async with proxy_of(*await shared.pair(model, enable_prefix_caching=True)) as client:
        first = await ask(client, PROMPT, stream=stream)
        same = await ask(client, PROMPT, stream=stream)
        more = await ask(client, [*PROMPT, *first.token_ids, *MORE], stream=stream)
    assert len(first.token_ids) == ANSWER
    assert [reply.usage.prompt_tokens for reply in (first, same, more)] == [70, 70, 102]
    assert [reply.cached for reply in (first, same, more)] == [0, 64, 70]
    assert [reply.on_p_and_d for reply in (first, same, more)] == [(0, 0), (64, 70), (70, 80)]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_tier_of_p_brings_counts_as_cached(
    cluster: Cluster, model: Path, *, stream: bool, tmp_path: Path
) -> None:
    """D's tier spares a pull and no computing: then P's count is told, as everywhere."""
    options: dict[str, Any] = {
        "enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
        "kv_transfer_config": both(tmp_path / "folder"),
    }
    p, d = await cluster.pair(model, **options)
    async with proxy_of(p, d) as client, client_of(p.url) as alone:
        await ask(client, PROMPT, stream=stream)
        for emptied in (p, d):
            await forget(emptied)
            again = await ask(client, PROMPT, stream=stream)
            assert again.cached == 64
        await forget(p)
        assert (await ask(alone, PROMPT, stream=stream)).cached == 64
        salted = await ask(alone, PROMPT, stream=stream, cache_salt="other")
        assert salted.cached == 0


async def test_p_keeps_a_state_where_the_client_says_that_prompts_part(
    shared: Cluster, model: Path
) -> None:
    """Others leave the prompt after 40 tokens; under a salt of its own nothing is cached."""
    async with proxy_of(*await shared.pair(model, enable_prefix_caching=True)) as client:
        await ask(client, PROMPT, stream=False, cache_boundaries=[40, 3, 9999, 40])
        other = [*PROMPT[:40], *MORE]
        found = await ask(client, other, stream=False)
        alone = await ask(client, other, stream=False, cache_salt="alone")
    assert (found.cached, alone.cached) == (32, 0)
    assert found.token_ids == alone.token_ids


@pytest.mark.parametrize("stream", [False, True])
async def test_each_node_by_itself(shared: Cluster, model: Path, stream: bool) -> None:
    """Behind a foreign proxy D tells what P had, as our proxy does: the rest was computed."""
    urls = [node.url for node in await shared.pair(model, enable_prefix_caching=True)]
    found, prompt = [], PROMPT
    async with client_of(urls[0]) as p, client_of(urls[1]) as d:
        for turn in range(3):
            prefilled = await ask(p, prompt, stream=False, kv_transfer_params=REMOTE_DECODE)
            decoded = await ask(d, prompt, stream=stream, kv_transfer_params=prefilled.params)
            found.append((prefilled.cached, decoded.cached))
            if turn == 1:
                prompt = [*PROMPT, *decoded.token_ids, *MORE]
    assert found == [(0, 0), (64, 64), (70, 70)]


@pytest.mark.parametrize("stream", [False, True])
async def test_without_a_hand_over(shared: Cluster, model: Path, stream: bool) -> None:
    """A node goes on from where its own answer ended."""
    node = await shared.start("decode", model, enable_prefix_caching=True)
    async with client_of(node.url) as client:
        first = await ask(client, PROMPT, stream=stream)
        same = await ask(client, PROMPT, stream=stream)
        more = await ask(client, [*PROMPT, *first.token_ids, *MORE], stream=stream)
    assert [reply.cached for reply in (first, same, more)] == [0, 64, 81]
