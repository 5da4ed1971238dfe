"""Without a cluster token anybody can sign: what P vouches for in its lease's record decides.

Every forgery names what an honest P really holds, or held, in another way than P does. None may
change a token, of its own request or of those that find in the cache what it left there.
"""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import to_builtins

from connector.pd.wire.params import ParamsSigner
from engine.types import KVTransferParams
from serving.config import KVTransferConfig
from serving.node.server import NodeServer
from tests.support.faults.faults import recomputed
from tests.support.faults.hostile_params import prompt_digest
from tests.support.nodes.asking import ask, prefill_over_http, question
from tests.support.nodes.cluster import Cluster, settled, transfer_config
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.turns import both_ways

Fields = dict[str, Any]
OTHER = list(prompt_of(100, salt=8))


@dataclass(slots=True)
class Forger:
    """A client that prefills what it likes; `held`: what P holds for it."""

    p: NodeServer
    held: list[str] = field(default_factory=list)

    async def prefilled(self, prompt: list[int]) -> Fields:
        params = await prefill_over_http(self.p.url, prompt)
        self.held.append(params["remote_request_id"])
        return params

    async def let_go(self) -> None:
        """Ends P's leases, which nobody will."""
        scheduler = self.p.engine.core.scheduler
        for request_id in self.held:
            await run_in_engine(self.p.engine, partial(scheduler.abort, request_id))
        self.held.clear()
        await settled(self.p)


def signed(params: Fields, **changes: object) -> Fields:
    forged = msgspec.convert({**params, **changes}, KVTransferParams)
    return dict(to_builtins(ParamsSigner(None).sign(forged)))


async def two_nodes(
    cluster: Cluster, model: Path, config: KVTransferConfig
) -> tuple[NodeServer, NodeServer]:
    """Whoever reads caches what it has read."""
    p, d = await cluster.pair(
        model, served_model_name=("tiny",), kv_transfer_config=config, enable_prefix_caching=True
    )
    return p, d


async def another_prompt(forger: Forger, victim: list[int]) -> Fields:
    """The blocks of one prompt under the name of another one."""
    own = await forger.prefilled(OTHER)
    return signed(own, remote_prompt_digest=prompt_digest(victim))


async def another_prompt_unnamed(forger: Forger, victim: list[int]) -> Fields:
    """The same, of blocks that D asks for."""
    return signed(await another_prompt(forger, victim), remote_block_ids=None)


async def blocks_of_another_lease(forger: Forger, victim: list[int]) -> Fields:
    own, true = await forger.prefilled(OTHER), await forger.prefilled(victim)
    return signed(true, remote_block_ids=own["remote_block_ids"])


async def request_of_another_lease(forger: Forger, victim: list[int]) -> Fields:
    """D asks where the blocks of one request lie, and looks into the record of another one."""
    own, true = await forger.prefilled(OTHER), await forger.prefilled(victim)
    return signed(true, remote_block_ids=None, remote_request_id=own["remote_request_id"])


async def one_block_for_all(forger: Forger, victim: list[int]) -> Fields:
    """P's own, and each one is a block of that lease."""
    true = await forger.prefilled(victim)
    blocks = [[group[-1]] * len(group) for group in true["remote_block_ids"]]
    return signed(true, remote_block_ids=blocks)


async def blocks_in_another_order(forger: Forger, victim: list[int]) -> Fields:
    true = await forger.prefilled(victim)
    return signed(true, remote_block_ids=[group[::-1] for group in true["remote_block_ids"]])


FORGERIES = (
    another_prompt,
    another_prompt_unnamed,
    blocks_of_another_lease,
    request_of_another_lease,
    one_block_for_all,
    blocks_in_another_order,
)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "not verified"])
async def test_no_signature_puts_other_bytes_under_a_prompt_s_name(
    shared: Cluster, model: Path, verify: bool
) -> None:
    """The first token is the forger's own affair: it is in no prompt of anybody else."""
    p, d = await two_nodes(shared, model, transfer_config(verify=verify))
    forger, fooled = Forger(p), []
    for number, forge in enumerate(FORGERIES):
        victim = list(prompt_of(100, salt=100 + number))
        truth = (await ask(p.url, question(victim))).token_ids
        params = await forge(forger, victim)
        answer = await ask(d.url, question(victim, kv_transfer_params=params))
        honest = await forger.prefilled(victim)
        handed = await ask(d.url, question(victim, kv_transfer_params=honest))
        alone = await ask(d.url, question(victim))
        right = handed.token_ids == alone.token_ids == truth
        if not right or answer.body["usage"].get("kv_transfer"):
            fooled.append(forge.__name__)
        await forger.let_go()
    assert fooled == []
    assert recomputed(d)["other_prompt"] == 100 * len(FORGERIES)


@pytest.mark.parametrize("verify", [True, False], ids=["verified", "not verified"])
async def test_nor_does_one_of_a_turn_that_goes_back(
    shared: Cluster, model: Path, verify: bool
) -> None:
    """D's record vouches for D's tokens; P computes what it asked for."""
    config = both_ways(kv_recompute_threshold=1, verify_transfers=verify)
    p, d = await two_nodes(shared, model, config)
    own = await prefill_over_http(p.url, OTHER)
    kept = (await ask(d.url, question(OTHER, kv_transfer_params=own))).body["kv_transfer_params"]
    num_kept = kept["remote_num_tokens"]
    victim = list(prompt_of(num_kept + 20, salt=7))
    truth = (await ask(d.url, question(victim))).token_ids
    forged = signed(kept, remote_prompt_digest=prompt_digest(victim[:num_kept]))
    done = await ask(p.url, question(victim, kv_transfer_params=forged))
    assert (await ask(p.url, question(victim))).token_ids == truth
    assert done.token_ids == truth[:1]
    assert done.body["usage"].get("kv_transfer") is None
    assert recomputed(p) == {"other_prompt": num_kept}
    await Forger(p, [done.body["kv_transfer_params"]["remote_request_id"]]).let_go()
