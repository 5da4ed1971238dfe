"""Hundreds of hostile `kv_transfer_params` against real nodes: each is refused, and that is all."""

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.faults.hostile_params import NO_PROMPT_NEEDS, hostile_params, outdated_params
from tests.support.nodes.asking import ask, prefill_over_http, question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import CLUSTER_TOKEN, ServedCluster, ServerProcess

PROMPT = list(prompt_of(90))
OTHER = list(prompt_of(60, salt=3))
AT_LEAST = 200
MAX_GROWTH = 256 << 20


async def test_each_variant_is_a_400_that_names_the_object_(served: ServedCluster) -> None:
    valid, variants, alone = await prepare(served)
    statuses: Counter[object] = Counter()
    async with others_go_on(served.d):
        for data in variants:
            answer = await ask(served.d.url, body_with(data))
            if len(data) > NO_PROMPT_NEEDS:
                statuses[answer.error(413)["code"]] += 1
                continue
            error = answer.error(400)
            assert error["param"] == "kv_transfer_params" or not is_json(data), (data[:300], error)
            assert len(error["message"]) <= 2_000
            statuses[error["code"]] += 1
    assert statuses.total() >= AT_LEAST
    assert len(statuses) >= 5, statuses
    await still_pulls(served, valid, alone)


async def test_what_p_signed_and_does_not_hold_is_computed(served: ServedCluster) -> None:
    """And whoever sends it has not even to know: also when it has been pulled before."""
    valid, _, alone = await prepare(served)
    spent = await prefill_over_http(served.p.url, PROMPT, logprobs=2)
    assert (await ask(served.d.url, with_params(spent))).token_ids == alone
    for params in (spent, *outdated_params(valid, CLUSTER_TOKEN)):
        answer = await ask(served.d.url, with_params(params))
        assert answer.token_ids == alone
        assert answer.body["usage"].get("kv_transfer") is None
        valid = await prefill_over_http(served.p.url, PROMPT, logprobs=2)
        await still_pulls(served, valid, alone)


async def prepare(served: ServedCluster) -> tuple[dict[str, Any], list[bytes], list[int]]:
    """P's answer, what is made of it, and the tokens that it stands for."""
    alone = (await ask(served.d.url, question(PROMPT))).token_ids
    valid = await prefill_over_http(served.p.url, PROMPT, logprobs=2)
    seed = secrets.randbelow(2**32)
    print(f"seed of hostile_params: {seed}")
    return valid, list(hostile_params(valid, CLUSTER_TOKEN, seed)), alone


async def still_pulls(served: ServedCluster, valid: dict[str, Any], alone: list[int]) -> None:
    """The true object was neither used up nor spoiled by its copies."""
    pulled = await ask(served.d.url, with_params(valid))
    assert pulled.token_ids == alone
    assert pulled.body["usage"]["kv_transfer"]["state_bytes"] > 0


@asynccontextmanager
async def others_go_on(node: ServerProcess) -> AsyncIterator[None]:
    """Requests of somebody else, one after the other, get the same tokens all the time."""
    expected = (await ask(node.url, question(OTHER))).token_ids
    before, stop = peak_bytes(node), asyncio.Event()

    async def go_on() -> int:
        answered = 0
        while not stop.is_set() or not answered:
            assert (await ask(node.url, question(OTHER))).token_ids == expected
            answered += 1
        return answered

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        stop.set()
        assert await task
    assert peak_bytes(node) - before < MAX_GROWTH


def with_params(params: dict[str, Any]) -> dict[str, Any]:
    return question(PROMPT, logprobs=2, kv_transfer_params=params)


def body_with(data: bytes) -> bytes:
    """A request whose `kv_transfer_params` are these very bytes."""
    head = json.dumps(question(PROMPT, logprobs=2)).encode()
    return head[:-1] + b', "kv_transfer_params": ' + data + b"}"


def is_json(data: bytes) -> bool:
    """As a strict parser sees it that reads no NaN and takes only so many levels."""
    try:
        json.loads(data.decode(), parse_constant=float)
    except (ValueError, RecursionError):
        return False
    return b"NaN" not in data and b"Infinity" not in data and b"\\ud8" not in data


def peak_bytes(node: ServerProcess) -> int:
    """The most memory that a process has held so far."""
    status = Path(f"/proc/{node.process.pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024
