"""P and D need not cut alike: other block sizes and units on each side give the same tokens."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.e2e.test_prefix_cache import assert_same, request_of
from tests.e2e.test_prefix_cache_pd import REMOTE_DECODE, hand_over, prompt_of
from tests.support.faults.faults import DamagedReads, counted, flip
from tests.support.nodes.cluster import Cluster, generate, settled
from tests.support.nodes.pairs import moved
from tests.tiers import l_shape

FAMILIES = ("qwen3_5", "nemotron_h", "gemma3", "falcon_h1", "kimi_linear")


@pytest.mark.parametrize(
    ("family", "sizes"),
    l_shape(FAMILIES, [(16, 32), (64, 16), (48, 32)], corner=("qwen3_5", (48, 32))),
)
async def test_blocks_of_another_size(
    shared: Cluster, checkpoints: dict[str, Path], family: str, sizes: tuple[int, int]
) -> None:
    p, d = await shared.pair(checkpoints[family], block_size=sizes[0], d={"block_size": sizes[1]})
    verified = 0
    for length in (1, 31, 100):
        prompt = prompt_of(length)
        alone = await generate(p, request_of(prompt))
        pair = await hand_over(p, d, prompt)
        assert moved(pair).attention_bytes > 0
        verified += moved(pair).attention_bytes + moved(pair).state_bytes
        assert pair.token_ids == alone.token_ids
        assert pair.logprobs == alone.logprobs
    assert counted(d, "tandem:kv_verified_bytes") == verified
    assert counted(d, "tandem:kv_unverified_transfers") == 0
    await settled(p)
    await settled(d)


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 32), (48, 16)])
async def test_damage_is_found_by_the_blocks_of_the_reader(
    shared: Cluster, model: Path, p_size: int, d_size: int
) -> None:
    """The last byte of the first span that is read; and of what is read again, if it is."""
    for times in (1, 2):
        faults = DamagedReads(lambda memory, spans: flip(memory, sum(spans[0][1:]) - 1), times)
        p = await shared.start("prefill", model, block_size=p_size)
        d = await shared.start("decode", model, block_size=d_size, faults=faults)
        prompt = prompt_of(100)
        alone = await generate(p, request_of(prompt))
        pair = await hand_over(p, d, prompt)
        assert (pair.token_ids, pair.logprobs) == (alone.token_ids, alone.logprobs)
        assert faults.hits == times
        kinds = [
            counted(d, "tandem:kv_verification_failures", kind=k) for k in ("state", "attention")
        ]
        assert sum(kinds) == times
        assert (not pair.last.was_pulled) == (times == 2)


@pytest.mark.parametrize(
    ("family", "sizes"), l_shape(FAMILIES, [(16, 32), (48, 16)], corner=("qwen3_5", (48, 16)))
)
async def test_only_what_d_lacks_is_pulled(
    shared: Cluster, checkpoints: dict[str, Path], family: str, sizes: tuple[int, int]
) -> None:
    p, d = await shared.pair(
        checkpoints[family],
        block_size=sizes[0],
        d={"block_size": sizes[1]},
        enable_prefix_caching=True,
    )
    alone = await shared.start("prefill", checkpoints[family])
    prompt = prompt_of(100)
    whole = await hand_over(p, d, prompt)
    # A sliding window keeps what was pulled with it: only a prompt that parts late still hits.
    longer = (*prompt[:98], *prompt_of(20, seed=8))
    pair = await hand_over(p, d, longer)
    assert moved(pair).decode_cached_tokens == 98 // sizes[1] * sizes[1]
    assert 0 < moved(pair).attention_bytes < moved(whole).attention_bytes
    assert_same(pair, await generate(alone, request_of(longer)))
    again = await hand_over(p, d, longer)
    assert (moved(again).attention_bytes, moved(again).state_bytes) == (0, 0)


async def test_a_window_that_came_in_part_is_read_from_there_on(
    shared: Cluster, checkpoints: dict[str, Path]
) -> None:
    """P has freed the front of the first large block of D's window, and D hands that on."""
    model = checkpoints["gemma3"]
    sizes: dict[str, Any] = {"hash_block_size": 16, "enable_prefix_caching": True}
    p = await shared.start("prefill", model, block_size=16, **sizes)
    d, last = [
        await shared.start(kind, model, block_size=64, **sizes) for kind in ("both", "decode")
    ]
    alone = await shared.start("prefill", model)
    prompt = prompt_of(144)
    await hand_over(p, d, prompt)
    longer = (*prompt, *prompt_of(9, seed=8))
    asked = msgspec.structs.replace(request_of(longer), kv_transfer_params=REMOTE_DECODE)
    done = await generate(d, asked)
    params = done.last.kv_transfer_params
    assert params is not None and params.remote_filled_from is not None
    assert max(params.remote_filled_from) == 96
    pair = await generate(last, msgspec.structs.replace(asked, kv_transfer_params=params))
    assert pair.last.was_pulled
    assert_same(pair, await generate(alone, request_of(longer)))
    # Prompts that part before need more of the window than came.
    for length in (143, 135, 128, 127, 113, 112, 100, 97):
        parted = (*prompt[:length], *prompt_of(9, seed=length))
        expected = await generate(alone, request_of(parted))
        for node in (d, last):
            assert_same(await generate(node, request_of(parted)), expected)
