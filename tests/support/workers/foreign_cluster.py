"""Doubles of one engine's workers, and a real proxy in front of them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import openai

from proxy.config import ProxyConfig
from serving.config import load_config
from tests.support.api.node_double import (
    client_of,
    fetch,
    metric,
    running_proxy,
    until,
    until_status,
    until_used,
)
from tests.support.nodes.leaks import excess, held_here
from tests.support.workers.sglang_double import SglangDouble
from tests.support.workers.vllm_double import VllmDouble
from tests.support.workers.worker_double import WorkerDouble, running_workers

PROMPT = [5, 6, 7]
HANG_S = 20.0
"""An answer that takes so long has waited for a deadline of the proxy."""


@dataclass(slots=True, frozen=True)
class Foreign:
    """A proxy at `base`, and the doubles: all P, all D."""

    base: str
    client: openai.AsyncOpenAI
    prefill: list[Any]
    decode: list[Any]

    async def ask(self, count: int = 4, **more: Any) -> list[int]:
        """The tokens of an answer that is not streamed."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": count, "return_token_ids": True}
        status, told = await self.post({**body, **more})
        assert status == 200, told
        return list(told["choices"][0]["token_ids"])

    async def refusal(self, **more: Any) -> tuple[int, str]:
        """Status and words of an error."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
        status, told = await self.post({**body, **more})
        return status, str(told["error"]["message"])

    async def post(
        self, body: dict[str, Any], path: str = "/v1/completions", **headers: str
    ) -> tuple[int, Any]:
        url = self.base + path
        async with (
            asyncio.timeout(HANG_S),
            aiohttp.ClientSession(headers=headers) as session,
            session.post(url, json=body) as reply,
        ):
            return reply.status, await reply.json()

    async def outcomes(self, kind: str) -> dict[str, float]:
        """By outcome the requests that nodes of a kind have had."""
        names = ("ok", "failed", "cancelled", "invalid_request", "overloaded", "deadline_exceeded")
        found = {}
        for name in names:
            values = await metric(
                self.base, "tandem_proxy_node_requests_total", kind=kind, outcome=name
            )
            if sum(values):
                found[name] = sum(values)
        return found

    async def until_problem(self, words: str) -> None:
        """Waits until /status names a problem with these words."""

        async def has_problem() -> bool:
            return words in (await fetch(f"{self.base}/status"))[1]

        await until(has_problem)

    async def nodes(self) -> list[dict[str, Any]]:
        """All that the status page has."""
        told = msgspec.json.decode((await fetch(f"{self.base}/status"))[1])
        return list(told["nodes"])


def workers_of(backend: str, num_prefill: int, num_decode: int) -> tuple[list[Any], list[Any]]:
    """P and D that can hand over to each other."""
    kinds = ["prefill"] * num_prefill + ["decode"] * num_decode
    made: list[WorkerDouble]
    if backend == "vllm":
        held: Any = {}
        made = [VllmDouble(kind, held=held) for kind in kinds]
    else:
        rooms: Any = {}
        made = [SglangDouble(kind, rooms=rooms) for kind in kinds]
    return made[:num_prefill], made[num_prefill:]


def foreign_config(
    prefill: list[Any], decode: list[Any], tokenizer: str, **options: Any
) -> ProxyConfig:
    given = {
        "prefill": tuple(it.url for it in prefill),
        "decode": tuple(it.url for it in decode),
        "tokenizer": tokenizer,
        "port": 0,
        "drain_timeout": 0.2,
        "enable_prompt_tokens_details": True,
    }
    return load_config(ProxyConfig, None, {**given, **options})


@asynccontextmanager
async def foreign_cluster(
    workers: tuple[list[Any], list[Any]],
    tokenizer: str,
    *,
    num_used: int | None = None,
    **options: Any,
) -> AsyncIterator[Foreign]:
    """A proxy that uses `num_used` of these workers, by default all, once their canaries worked.

    In the end no task, socket or request is left of it.
    """
    prefill, decode = workers
    before = held_here()
    async with running_workers(*prefill, *decode):
        config = foreign_config(prefill, decode, tokenizer, **options)
        async with running_proxy(config) as base, client_of(base) as client:
            count = len(prefill) + len(decode) if num_used is None else num_used
            await until_used(base, count)
            if count:
                await until_status(f"{base}/ready", 200)
            yield Foreign(base, client, prefill, decode)

    async def is_clean() -> bool:
        return not excess(before, held_here())

    await until(is_clean)
