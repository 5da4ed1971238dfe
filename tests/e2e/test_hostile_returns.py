"""Hundreds of hostile variants of what D answers for the next turn, against a real P over HTTP.

What no node of the cluster signed is refused; what one signed and nobody holds is not pulled.
"""

import json
import secrets
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from serving.node.server import NodeServer
from tests.support.faults.hostile_params import (
    NO_PROMPT_NEEDS,
    hostile_returns,
    outdated_returns,
    prompt_digest,
)
from tests.support.nodes.asking import ask, prefill_over_http, question
from tests.support.nodes.cluster import Cluster, settled
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import CLUSTER_TOKEN
from tests.support.nodes.turns import both_ways, skipped

AT_LEAST = 200


async def two_nodes(cluster: Cluster, model: Path) -> tuple[NodeServer, NodeServer]:
    config = both_ways(kv_recompute_threshold=1, decoder_kv_blocks_ttl=60.0)
    return await cluster.pair(
        model, config, cluster_token=CLUSTER_TOKEN, served_model_name=("tiny",)
    )


async def kept_turn(p: NodeServer, d: NodeServer) -> tuple[list[int], dict[str, Any]]:
    """The tokens of a first turn with a new question, and the parameters that D returns for P."""
    prompt = list(prompt_of(60))
    params = await prefill_over_http(p.url, prompt)
    answer = await ask(d.url, question(prompt, kv_transfer_params=params))
    said = [*prompt, *answer.token_ids, *prompt_of(9, salt=2)]
    return said, answer.body["kv_transfer_params"]


async def test_what_no_node_signed_is_a_400_and_the_true_object_still_pulls(
    shared: Cluster, model: Path
) -> None:
    p, d = await two_nodes(shared, model)
    prompt, valid = await kept_turn(p, d)
    seed = secrets.randbelow(2**32)
    print(f"seed of hostile_returns: {seed}")
    head = json.dumps(question(prompt)).encode()[:-1]
    codes: set[object] = set()
    number = 0
    for data in hostile_returns(valid, CLUSTER_TOKEN, seed):
        answer = await ask(p.url, head + b', "kv_transfer_params": ' + data + b"}")
        codes.add(answer.error(413 if len(data) > NO_PROMPT_NEEDS else 400)["code"])
        number += 1
    assert number >= AT_LEAST
    assert {"partial_kv_transfer_params", "foreign_kv_transfer_params"} <= codes
    assert skipped(p) == {}
    assert d.engine.core.scheduler.num_held == 1
    done = await ask(p.url, question(prompt, kv_transfer_params=valid))
    assert done.body["usage"]["kv_transfer"]["state_bytes"] > 0
    onward = await ask(
        d.url, question(prompt, max_tokens=1, kv_transfer_params=done.body["kv_transfer_params"])
    )
    assert len(onward.token_ids) == 1
    for node in (p, d):
        await settled(node)


@pytest.mark.parametrize(
    "cause",
    ["other_tokens", "not_longer", "mismatched", "foreign", "expired", "peer_unreachable"],
)
async def test_what_a_node_signed_and_nobody_holds_is_computed(
    shared: Cluster, model: Path, cause: str
) -> None:
    """`mismatched`: the tokens are right, and D's state stands one token behind them."""
    p, d = await two_nodes(shared, model)
    prompt, valid = await kept_turn(p, d)
    shorter = prompt_digest(prompt[: valid["remote_num_tokens"] - 1])
    params = outdated_returns(valid, shorter, CLUSTER_TOKEN)[cause]
    done = await ask(p.url, question(prompt, kv_transfer_params=params))
    assert skipped(p) == {cause: 1}
    assert done.body["usage"].get("kv_transfer") is None
    plain = await ask(p.url, question(prompt, max_tokens=1))
    assert done.token_ids == plain.token_ids
    alone = await ask(d.url, question(prompt, kv_transfer_params=done.body["kv_transfer_params"]))
    assert alone.token_ids[:1] == plain.token_ids
    for kept in (valid, alone.body["kv_transfer_params"]):
        held = kept["remote_request_id"]
        await run_in_engine(d.engine, partial(d.engine.core.scheduler.abort, held))
    await settled(d)
