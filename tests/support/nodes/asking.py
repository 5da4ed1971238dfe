"""Plain HTTP against nodes and proxies, a connection for each question so that none stays open."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec

from engine.types import KVTransferParams
from tests.support.nodes.pairs import GREEDY
from tests.support.nodes.processes import API_KEY

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
TIMEOUT = aiohttp.ClientTimeout(total=60)
REMOTE_DECODE: dict[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}


@dataclass(slots=True, frozen=True)
class Answer:
    """One reply; `body` is its JSON."""

    status: int
    headers: Mapping[str, str]
    body: dict[str, Any]

    @property
    def token_ids(self) -> list[int]:
        """Of the first choice of a successful reply."""
        assert self.status == 200, self.body
        ids: list[int] = self.body["choices"][0]["token_ids"]
        return ids

    def error(self, status: int) -> dict[str, Any]:
        """The error object of a reply with `status`; it must be whole."""
        assert self.status == status, (self.status, self.body)
        error: dict[str, Any] = self.body["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["message"] and error["type"]
        return error


def question(prompt: object, **changes: object) -> dict[str, Any]:
    """A greedy request for ten tokens by their ids."""
    return {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": 10,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **changes,
    }


async def ask(
    url: str,
    body: object,
    *,
    path: str = COMPLETIONS,
    key: str | None = API_KEY,
    content_type: str = "application/json",
) -> Answer:
    """Posts `body`, as JSON unless it is bytes already."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"Content-Type": content_type, "X-Request-Id": "same for all", **_auth(key)}
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url + path, data=data, headers=headers) as reply,
    ):
        return Answer(reply.status, reply.headers, await reply.json())


async def get(url: str, path: str, *, key: str | None = API_KEY) -> Answer:
    """Gets JSON."""
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.get(url + path, headers=_auth(key)) as reply,
    ):
        return Answer(reply.status, reply.headers, await reply.json())


async def stream(
    url: str,
    body: object,
    events: list[dict[str, Any]] | None = None,
    *,
    path: str = COMPLETIONS,
) -> list[dict[str, Any]]:
    """Every event of a streaming reply but [DONE]; `events` grows as they come."""
    events = [] if events is None else events
    async with (
        aiohttp.ClientSession(timeout=TIMEOUT) as session,
        session.post(url + path, json=body, headers=_auth(API_KEY)) as reply,
    ):
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
    return events


def streamed_ids(events: list[dict[str, Any]]) -> list[int]:
    """Token ids of all chunks."""
    choices = [choice for event in events for choice in event.get("choices", ())]
    return [token for choice in choices for token in choice.get("token_ids") or ()]


async def prefill_over_http(url: str, prompt: object, **changes: object) -> dict[str, Any]:
    """P's answer to a proxy that asks it for a remote decode."""
    body = question(prompt, max_tokens=1, kv_transfer_params=REMOTE_DECODE, **changes)
    answer = await ask(url, body)
    assert answer.status == 200, answer.body
    params: dict[str, Any] = answer.body["kv_transfer_params"]
    return params


async def remote_prefill(url: str, prompt: Sequence[int]) -> KVTransferParams:
    """P's answer, for a request to D that wants what GREEDY wants."""
    answered = await prefill_over_http(url, list(prompt), logprobs=GREEDY.logprobs)
    return msgspec.convert(answered, KVTransferParams)


def _auth(key: str | None) -> dict[str, str]:
    return {} if key is None else {"Authorization": f"Bearer {key}"}
