"""What others may say to a prefill node about its leases: twice, too late, to nobody, to another.

A real control client says it. Whatever is said, no lease ends but the one that is meant.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.messages import DigestsQuestion
from engine.errors import KVTransferParamsError
from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.support.nodes.accounts import Account, leases_of
from tests.support.nodes.cluster import Cluster, generate
from tests.support.nodes.pairs import GREEDY, hand_over, prefill, prompt_of, request_of

PROMPT = prompt_of(60, salt=4)
S = 10.0
Reply = TypeVar("Reply")


@contextmanager
def control_of(p: NodeServer) -> Iterator[ControlClient]:
    """Somebody who may talk to P."""
    client = ControlClient(
        f"127.0.0.1:{p.rpc.port}", token=None, caller_engine_id="the test", timeout_s=S
    )
    try:
        yield client
    finally:
        client.close()


async def said(call: Callable[..., Reply], *arguments: object, **named: object) -> Reply:
    """A blocking call, off the event loop that answers it."""
    return await asyncio.to_thread(partial(call, *arguments, **named))


async def release(
    client: ControlClient, params: KVTransferParams, request_id: str | None = None
) -> bool:
    name = params.remote_request_id if request_id is None else request_id
    return await said(client.release, params.remote_engine_id, name, reason="test")


async def pair_at_rest(cluster: Cluster, model: Path) -> tuple[NodeServer, NodeServer, Account]:
    p, d = await cluster.pair(model)
    await hand_over(p, d, PROMPT)
    return p, d, await Account.open(p, d)


async def test_a_release_that_comes_twice_frees_once(cluster: Cluster, model: Path) -> None:
    p, d, account = await pair_at_rest(cluster, model)
    alone = await generate(p, request_of(PROMPT))
    params, other = [await prefill(p, PROMPT) for _ in range(2)]
    with control_of(p) as client:
        assert [await release(client, params) for _ in range(3)] == [True, False, False]
        assert len(leases_of(p).all_held()) == 1
        pair = await generate(d, request_of(PROMPT, GREEDY, other))
        assert not await release(client, other)
    assert pair.last.was_pulled
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    await account.close()


async def test_a_release_of_nothing_ends_nothing(cluster: Cluster, model: Path) -> None:
    p, d, account = await pair_at_rest(cluster, model)
    params = await prefill(p, PROMPT)
    assert params.remote_request_id == "r-2"
    with control_of(p) as client:
        for name in ("", "r-", "r-0", "unknown", "r-2\n", "r" * 10_000):
            assert not await release(client, params, name)
            assert len(leases_of(p).all_held()) == 1, name
        pair = await generate(d, request_of(PROMPT, GREEDY, params))
        assert pair.last.was_pulled
        params = await prefill(p, PROMPT)
        assert not await release(client, params, "r")
        assert not leases_of(p).all_held()  # the label is that of a caller who left early
    await account.close()


async def test_a_name_that_begins_another_name_means_itself(cluster: Cluster, model: Path) -> None:
    """`r-1` and `r-10`, as node and label; generations alone could not tell them apart."""
    p, d, account = await pair_at_rest(cluster, model)
    held = [await prefill(p, PROMPT) for _ in range(15)]
    first, last = held[0], held[-1]
    assert (first.remote_request_id, last.remote_request_id) == ("r-2", "r-10")
    with control_of(p) as client:
        assert not await release(client, last, "r-1")
        assert len(leases_of(p).all_held()) == len(held)
        assert await release(client, last)
        assert not await release(client, last, "r-1")
        assert len(leases_of(p).all_held()) == len(held) - 1
        for params in held[1:-1]:
            assert await release(client, params)
    pair = await generate(d, request_of(PROMPT, GREEDY, first))
    assert pair.last.was_pulled
    await account.close()


async def test_what_was_said_once_has_no_effect_when_it_is_said_again_later(
    cluster: Cluster, model: Path
) -> None:
    """Every message of a hand-over that is over, while another one lives."""
    p, d, account = await pair_at_rest(cluster, model)
    over, living = [await prefill(p, PROMPT) for _ in range(2)]
    await generate(d, request_of(PROMPT, GREEDY, over))
    engine_id, name = over.remote_engine_id, over.remote_request_id
    generation = over.remote_generation
    assert engine_id and name and generation
    question = DigestsQuestion(
        engine_id=engine_id, request_id=name, generation=generation, ranges=()
    )
    with control_of(p) as client:
        with pytest.raises(KVTransferParamsError, match="not held here"):
            await said(client.claim, engine_id, name)
        lost = await said(client.renew, engine_id, [name], [generation])
        assert lost == (name,)
        with pytest.raises(KVTransferParamsError, match="not held here"):
            await said(client.digests, question)
        assert not await release(client, over)
        for stranger in ("", "another-node", f"{engine_id}0"):
            with pytest.raises(KVTransferParamsError, match="that node is gone"):
                await said(client.release, stranger, living.remote_request_id, reason="test")
    assert len(leases_of(p).all_held()) == 1
    pair = await generate(d, request_of(PROMPT, GREEDY, living))
    assert pair.last.was_pulled
    await account.close()
