"""A hostile client's requests: values at the edge, large bodies, forged hand-overs, idle sockets.

None of it may end, freeze or fool a server. What it answers matters only as far as that.
"""

import asyncio
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from http import HTTPStatus
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import aiohttp

from benchmarks.robustness.soak.cluster import TENANTS
from benchmarks.robustness.soak.workload import NAME

TIMEOUT_S = 30.0
LARGE_TEXT_BYTES = 30_000_000
NUM_IDS = 2_000_000
NUM_KEYS = 500_000
NUM_IDLE = 200
KEY = next(iter(TENANTS))
IDLE_S = 3.0
EDGES: tuple[dict[str, Any], ...] = (
    {"temperature": 1e-310},
    {"temperature": 5e-324, "top_p": 1e-300},
    {"repetition_penalty": 1e-310, "temperature": 1},
    {"repetition_penalty": 10, "presence_penalty": 2, "frequency_penalty": -2, "seed": 2**63 - 1},
    {"priority": -(2**31)},
    {"n": 64, "prompt": ["a"] * 64},
    {"max_tokens": 10**9},
    {"stop": ["a" * 10_000]},
    {"logprobs": 10**9},
)
GARBAGE = (
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET / HTTP/9.9\r\n\r\n",
    b"PRI * HTTP/2.0",
)

Hostile: TypeAlias = Callable[[str, random.Random], Awaitable[int]]


async def edge_of_sampling(url: str, draw: random.Random) -> int:
    """Values at the edge of what is allowed, or beyond."""
    body = {"model": NAME, "prompt": "Once upon a time", "max_tokens": 4, **draw.choice(EDGES)}
    return await _post(url, "/v1/completions", body)


async def large_text(url: str, draw: random.Random) -> int:
    """More text than any prompt can have."""
    path = draw.choice(("/v1/completions", "/tokenize"))
    return await _post(url, path, {"model": NAME, "prompt": "once " * (LARGE_TEXT_BYTES // 5)})


async def many_ids(url: str, draw: random.Random) -> int:
    """More token ids than any prompt can have."""
    if draw.random() < 0.5:
        return await _post(url, "/detokenize", {"model": NAME, "tokens": [5] * NUM_IDS})
    return await _post(url, "/v1/completions", {"model": NAME, "prompt": [5] * NUM_IDS})


async def many_keys(url: str, draw: random.Random) -> int:
    """An object of very many keys."""
    return await _post(url, "/v1/completions", dict.fromkeys(map(str, range(NUM_KEYS)), 0))


async def forged_hand_over(url: str, draw: random.Random) -> int:
    """Parameters that no node has signed; a proxy throws them away, a node refuses them."""
    params = {
        "do_remote_prefill": True,
        "remote_engine_id": "prefill-forged",
        "remote_request_id": "forged",
        "remote_block_ids": [[draw.randrange(2**62)]],
        "remote_host": "127.0.0.1",
        "remote_port": draw.randrange(1, 65_536),
        "remote_num_tokens": 3,
        "remote_prompt_digest": "0" * 64,
        "remote_generation": draw.randrange(1, 2**62),
        "first_token_ids": [5],
        "signature": "0" * 64,
    }
    body = {"model": NAME, "prompt": [5, 6, 7], "max_tokens": 2, "kv_transfer_params": params}
    return await _post(url, "/v1/completions", body)


async def idle_sockets(url: str, draw: random.Random) -> int:
    """Connections that say nothing, or not HTTP, for a while."""
    place = urlsplit(url)
    with ExitStack() as stack:
        for _ in range(NUM_IDLE):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            connection.connect_ex((place.hostname, place.port))
            await asyncio.sleep(0)
            if draw.random() < 0.3:
                _say(connection, draw.choice(GARBAGE))
        await asyncio.sleep(IDLE_S)
    return 0


ALL: tuple[Hostile, ...] = (
    edge_of_sampling,
    edge_of_sampling,
    large_text,
    many_ids,
    many_keys,
    forged_hand_over,
    idle_sockets,
)


async def strike(url: str, draw: random.Random) -> tuple[str, str]:
    """One hostile act: what it was, and a status, or the error with which it ended."""
    act = draw.choice(ALL)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return act.__name__, str(await act(url, draw))
    except TimeoutError:
        return act.__name__, f"no answer in {TIMEOUT_S:g} s"
    except (aiohttp.ClientError, OSError) as error:
        return act.__name__, type(error).__name__


def is_bad(outcome: str) -> bool:
    """A server may refuse and hang up, but must neither fail nor keep a hostile client waiting."""
    busy = str(HTTPStatus.SERVICE_UNAVAILABLE)
    return outcome.startswith("no answer") or (outcome.startswith("5") and outcome != busy)


def _say(connection: socket.socket, words: bytes) -> None:
    try:
        connection.send(words)
    except OSError:
        return  # not connected yet, or cut off already: both are fine


async def _post(url: str, path: str, body: dict[str, Any]) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(url, headers=headers) as http,
        http.post(path, json=body) as reply,
    ):
        await reply.read()
        return reply.status
