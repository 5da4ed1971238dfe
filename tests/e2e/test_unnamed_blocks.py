"""Of a very long prompt P does not name the blocks: D asks its control service where they are."""

from pathlib import Path

import pytest

from connector.pd.prefill import producer
from engine.errors import KVLoadError
from engine.types import KVTransferParams
from serving.node.server import NodeServer
from tests.support.faults.faults import counted
from tests.support.nodes.accounts import at_rest
from tests.support.nodes.cluster import Cluster, generate, transfer_config, until
from tests.support.nodes.pairs import (
    GREEDY,
    TRANSPORTS,
    end_hold,
    hand_over,
    prefill,
    prompt_of,
    request_of,
)
from tests.tiers import everyday

PROMPT = prompt_of(100, salt=7)


@pytest.fixture(autouse=True)
def few_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """`PROMPT` has more."""
    monkeypatch.setattr(producer, "MAX_NAMED_BLOCKS", 6)


@pytest.mark.parametrize("transport", everyday(TRANSPORTS, ("shm",)))
async def test_blocks_that_p_has_not_named_are_asked_for(
    shared: Cluster, model: Path, transport: str
) -> None:
    p, d = await shared.pair(model, transfer_config(transport))
    for length, is_named in ((64, True), (100, False), (100, False)):
        alone = await generate(p, request_of(PROMPT[:length]))
        params = await prefill(p, PROMPT[:length])
        assert (params.remote_block_ids is not None) == is_named
        pair = await generate(d, request_of(PROMPT[:length], GREEDY, params))
        assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
        assert pair.last.kv_transfer is not None
        assert pair.last.kv_transfer.verified
        await at_rest(p)
    await at_rest(d)


async def test_a_prefill_that_p_holds_no_more_is_computed(shared: Cluster, model: Path) -> None:
    p, d = await shared.pair(model, transfer_config())
    alone = await generate(p, request_of(PROMPT))
    params = await let_go(p)
    pair = await generate(d, request_of(PROMPT, GREEDY, params))
    assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
    assert not pair.last.was_pulled
    assert counted(d, "tandem:kv_late_reads") == 1
    assert (await hand_over(p, d, PROMPT)).last.was_pulled
    await at_rest(p)
    await at_rest(d)


async def test_or_is_an_error_where_the_node_is_told_so(shared: Cluster, model: Path) -> None:
    p, d = await shared.pair(model, transfer_config(policy="fail"))
    with pytest.raises(KVLoadError, match="late_read"):
        await generate(d, request_of(PROMPT, GREEDY, await let_go(p)))
    await at_rest(d)


async def let_go(p: NodeServer) -> KVTransferParams:
    """P's answer, of which it holds nothing any more."""
    params = await prefill(p, PROMPT)
    await end_hold(p, params)
    await until(lambda: not p.engine.core.scheduler.num_held)
    return params
