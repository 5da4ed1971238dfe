"""Messages to a prefill node about leases that are over: no lease ends that is not meant."""

from pathlib import Path

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


def control_of(p: NodeServer) -> ControlClient:
    """Somebody who may talk to P."""
    address = f"127.0.0.1:{p.rpc.port}"
    return ControlClient(address, token=None, caller_engine_id="the test", timeout_s=S)


async def release(
    client: ControlClient, params: KVTransferParams, request_id: str | None = None
) -> bool:
    name = params.remote_request_id if request_id is None else request_id
    return await client.release(params.remote_engine_id or "", name or "", reason="test")


async def pair_at_rest(cluster: Cluster, model: Path) -> tuple[NodeServer, NodeServer, Account]:
    p, d = await cluster.pair(model)
    await hand_over(p, d, PROMPT)
    return p, d, await Account.open(p, d)


async def test_what_was_said_once_has_no_effect_when_it_is_said_again_later(
    cluster: Cluster, model: Path
) -> None:
    """Repeats every message of a hand-over that is over, while another one lives."""
    p, d, account = await pair_at_rest(cluster, model)
    over, living = [await prefill(p, PROMPT) for _ in range(2)]
    await generate(d, request_of(PROMPT, GREEDY, over))
    engine_id, name = over.remote_engine_id, over.remote_request_id
    generation = over.remote_generation
    assert engine_id and name and generation
    question = DigestsQuestion(
        engine_id=engine_id, request_id=name, generation=generation, ranges=()
    )
    async with control_of(p) as client:
        with pytest.raises(KVTransferParamsError, match="not held here"):
            await client.claim(engine_id, name)
        lost = await client.renew(engine_id, [name], [generation])
        assert lost == (name,)
        with pytest.raises(KVTransferParamsError, match="not held here"):
            await client.digests(question)
        assert not await release(client, over)
        for stranger in ("", "another-node", f"{engine_id}0"):
            with pytest.raises(KVTransferParamsError, match="that node is gone"):
                await client.release(stranger, living.remote_request_id or "", reason="test")
    assert len(leases_of(p).all_held()) == 1
    pair = await generate(d, request_of(PROMPT, GREEDY, living))
    assert pair.last.was_pulled
    await account.close()
