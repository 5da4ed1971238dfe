"""Conversations over a pair of nodes whose second turn goes back to where the first was decoded."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from engine.types import KVTransferParams, SamplingParams
from serving.config import KVTransferConfig
from serving.node.server import NodeServer
from tests.support.cache.recount import evict_all
from tests.support.faults.fault_points import NO_FAULTS, FaultInjector
from tests.support.faults.faults import counted
from tests.support.nodes.cluster import Cluster, Generation, generate, settled
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.pairs import GREEDY, REMOTE_DECODE, end_hold, prompt_of, request_of

SKIPPED = "tandem:kv_return_pulls_skipped"
CAUSES = (
    *("disabled", "not_longer", "other_tokens", "below_threshold"),
    *("expired", "foreign", "mismatched", "peer_unreachable"),
)


def both_ways(
    transport: str = "shm",
    *,
    policy: str = "recompute",
    role: str = "kv_both",
    on: bool = True,
    **changes: object,
) -> KVTransferConfig:
    """A kv_transfer_config with the way back open, unless `on` is false."""
    extra = {"transport": transport, "control_timeout": 2.0, "bidirectional_kv_xfer": on}
    fields = {
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {**extra, **changes},
    }
    return msgspec.convert(fields, KVTransferConfig)


@dataclass(slots=True)
class Turn:
    """One turn: P's part, with one token, and D's, with all."""

    prompt: tuple[int, ...]
    prefilled: Generation
    decoded: Generation

    @property
    def said(self) -> tuple[int, ...]:
        """Prompt and answer."""
        return (*self.prompt, *self.decoded.token_ids)

    @property
    def kept(self) -> KVTransferParams:
        """Where D keeps it."""
        params = self.decoded.last.kv_transfer_params
        assert params is not None
        return params

    @property
    def num_kept(self) -> int:
        """Tokens that D has computed: all but the last, which was only sampled."""
        return len(self.said) - 1


async def take_turn(
    p: NodeServer,
    d: NodeServer,
    prompt: tuple[int, ...],
    sampling: SamplingParams = GREEDY,
    before: Turn | None = None,
) -> Turn:
    """One turn, which goes on from `before` if P pulls that."""
    params = REMOTE_DECODE if before is None else before.kept
    prefilled = await generate(p, request_of(prompt, sampling, params))
    answer = prefilled.last.kv_transfer_params
    assert answer is not None
    assert answer.remote_num_tokens == len(prompt)
    return Turn(prompt, prefilled, await generate(d, request_of(prompt, sampling, answer)))


def next_prompt(before: Turn, length: int = 30, salt: int = 5) -> tuple[int, ...]:
    """The conversation so far, and a new question."""
    return (*before.said, *prompt_of(length, salt))


async def pair_of_nodes(
    cluster: Cluster,
    model: Path,
    config: KVTransferConfig,
    *,
    on_p: FaultInjector = NO_FAULTS,
    on_d: FaultInjector = NO_FAULTS,
    d_caches: bool = True,
) -> tuple[NodeServer, NodeServer]:
    """P caches prefixes: where states are kept cuts the scans, and so decides about rounding.

    So does what D keeps of its own when P computes a turn that D has decoded: `d_caches`.
    """
    d = {"enable_prefix_caching": d_caches}
    return await cluster.pair(model, config, on_p=on_p, on_d=on_d, d=d, enable_prefix_caching=True)


async def forget(node: NodeServer) -> None:
    """Empties a node's prefix cache: what it needs again, it must compute or pull."""
    await settled(node)
    await run_in_engine(node.engine, partial(evict_all, node.engine.core.scheduler.cache))


async def first_turn(p: NodeServer, d: NodeServer) -> Turn:
    """A turn that D keeps and P has forgotten."""
    turn = await take_turn(p, d, prompt_of(90))
    await forget(p)
    assert d.engine.core.scheduler.num_held == 1
    return turn


async def let_go(d: NodeServer, *turns: Turn) -> None:
    """Ends what D keeps of turns that nobody goes on with, and waits until all memory is back."""
    for turn in turns:
        await end_hold(d, turn.kept)
    await settled(d)


def skipped(node: NodeServer) -> dict[str, float]:
    """Return pulls that were not made, by cause."""
    found = {cause: counted(node, SKIPPED, cause=cause) for cause in CAUSES}
    return {cause: number for cause, number in found.items() if number}
