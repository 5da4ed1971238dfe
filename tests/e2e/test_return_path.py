"""The next turn: P pulls from D what D has computed, and no token or log-probability changes."""

from pathlib import Path

import msgspec
import pytest

from engine.types import SamplingParams
from tests.cluster import Cluster, generate, until
from tests.pairs import FAMILIES, GREEDY, prompt_of, request_of
from tests.turns import (
    assert_equal,
    both_ways,
    forget,
    let_go,
    next_prompt,
    pair_of_nodes,
    skipped,
    take_turn,
)

SAMPLED = SamplingParams(
    max_tokens=20, temperature=0.9, top_p=0.95, seed=11, logprobs=1, ignore_eos=True
)
LONG = msgspec.structs.replace(GREEDY, max_tokens=20)


@pytest.mark.parametrize("sampling", [LONG, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("transport", ["shm", "nixl"])
@pytest.mark.parametrize("family", FAMILIES)
async def test_three_turns_are_bit_equal_to_one_node(
    cluster: Cluster,
    checkpoints: dict[str, Path],
    family: str,
    transport: str,
    sampling: SamplingParams,
) -> None:
    p, d = await pair_of_nodes(cluster, checkpoints[family], both_ways(transport))
    one = await cluster.start("decode", checkpoints[family], enable_prefix_caching=True)
    prompt, before, computed = prompt_of(90), None, 0
    for _ in range(3):
        alone = await generate(one, request_of(prompt, sampling))
        assert alone.last.num_cached_tokens == computed
        turn = await take_turn(p, d, prompt, sampling, before)
        assert_equal(turn.decoded, alone)
        assert (turn.prefilled.last.kv_transfer is not None) == (before is not None)
        await until(lambda: d.engine.core.scheduler.num_held == 1)
        await forget(p)
        prompt, before, computed = next_prompt(turn), turn, turn.num_kept
    assert before is not None
    await let_go(d, before)
    assert skipped(p) == {}
