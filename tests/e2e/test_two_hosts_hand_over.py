"""The hand-over suite between two hosts: what it asks does not depend on where the nodes are.

Left out are shared memory and what happens on one node alone: leases that nobody claims, answers
that nobody takes, types that do not fit.
"""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest

from tests.support.network.two_hosts import TwoHosts, transfers
from tests.support.nodes.cluster import generate
from tests.support.nodes.hand_over_checks import (
    CHANGES,
    cancel_behind_the_first_token,
    check_eight_at_once,
    check_one_token_moves_nothing,
    check_recompute,
    check_refused,
    check_tokens_and_logprobs,
)
from tests.support.nodes.pairs import GREEDY, prefill, prompt_of, request_of
from tests.support.nodes.processes import ServerProcess
from tests.support.nodes.remote_node import RemoteNode, remote_node

# A hybrid over every transport; the other families move the same kinds of bytes.
PAIRS = [pytest.param("qwen3_5", "nixl")]
PAIRS += [
    pytest.param(*pair, marks=pytest.mark.long)
    for pair in (("qwen3_5", "ucx"), ("qwen3_5", "zmq"), ("nemotron_h", "nixl"))
]


@pytest.mark.parametrize(("family", "transport"), PAIRS)
async def test_the_hand_over_suite_passes_between_two_hosts(
    hosts: TwoHosts,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    record_property: Callable[[str, object], None],
    family: str,
    transport: str,
) -> None:
    p_server, d_server = hosts.start_pair(checkpoints[family], tmp_path, transfers(transport))
    async with AsyncExitStack() as stack:
        p = await stack.enter_async_context(remote_node(hosts.p, p_server, tmp_path))
        d = await stack.enter_async_context(remote_node(hosts.d, d_server, tmp_path))
        record_property("near-ties", await check_eight_at_once(p, d))
        hosts.remember_start_values()  # with the connections that as many pulls at once have made
        await check_tokens_and_logprobs(p, d)
        await check_one_token_moves_nothing(p, d)
        await cancel_behind_the_first_token(p, d)
        await check_changed_parameters(p, d)
        await asyncio.to_thread(hosts.assert_at_rest)
        await check_a_lost_p(p_server, p, d)
        await asyncio.to_thread(hosts.d.assert_at_rest)


async def check_changed_parameters(p: RemoteNode, d: RemoteNode) -> None:
    """All are refused, and what they spoke of can be had afterwards."""
    params = await prefill(p, prompt_of(30))
    for change, code in CHANGES:
        await check_refused(d, msgspec.structs.replace(params, **change), code)
    pair = await generate(d, request_of(prompt_of(30), GREEDY, params))
    assert pair.last.was_pulled


async def check_a_lost_p(server: ServerProcess, p: RemoteNode, d: RemoteNode) -> None:
    """It ends between its part and D's."""
    prompt = prompt_of(100)
    params = await prefill(p, prompt)
    # In a thread: this one passes on what both sides send, gRPC's pings among it.
    await asyncio.to_thread(server.stop)
    await check_recompute(d, prompt, params)
