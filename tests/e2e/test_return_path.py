"""The next turn: P pulls from D what D has computed, and no token or log-probability changes.

One node that answers the same turns goes on from where its own answer ended, too: equal bit by bit.
"""

import asyncio
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from engine.types import FinishReason, SamplingParams
from tests.support.faults.faults import DamagedReads, flip, recomputed
from tests.support.nodes.cluster import Cluster, generate, sample, settled, until
from tests.support.nodes.pairs import (
    FAMILIES,
    GREEDY,
    REMOTE_DECODE,
    arena_for,
    assert_equal,
    count_near_ties,
    end_hold,
    prefill,
    prompt_of,
    request_of,
)
from tests.support.nodes.turns import (
    Turn,
    both_ways,
    forget,
    let_go,
    next_prompt,
    pair_of_nodes,
    skipped,
    take_turn,
)
from tests.tiers import everyday, l_shape

FAMILY = "qwen3_5"
LONG = msgspec.structs.replace(GREEDY, max_tokens=20)
SAMPLED = SamplingParams(
    max_tokens=20, temperature=0.9, top_p=0.95, seed=11, logprobs=1, ignore_eos=True
)
SAMPLINGS = {"greedy": LONG, "sampled": SAMPLED}
TRANSPORTS = ("shm", "nixl")
LENGTHS, ANSWERS = (16, 77, 78, 79, 80, 81), (2, 3, 17)


@pytest.mark.parametrize(
    ("family", "transport", "sampling"),
    l_shape(FAMILIES, TRANSPORTS, SAMPLINGS, corner=(FAMILY, "shm", "greedy")),
)
async def test_three_turns_are_bit_equal_to_one_node(
    shared: Cluster,
    checkpoints: dict[str, Path],
    family: str,
    transport: str,
    sampling: str,
) -> None:
    p, d = await pair_of_nodes(shared, checkpoints[family], both_ways(transport))
    one = await shared.start("decode", checkpoints[family], enable_prefix_caching=True)
    params, prompt, before, computed = SAMPLINGS[sampling], prompt_of(90), None, 0
    for _ in range(3):
        alone = await generate(one, request_of(prompt, params))
        assert alone.last.num_cached_tokens == computed
        turn = await take_turn(p, d, prompt, params, before)
        assert_equal(turn.decoded, alone)
        assert turn.prefilled.last.was_pulled == (before is not None)
        await until(lambda: d.engine.core.scheduler.num_held == 1)
        await forget(p)
        prompt, before, computed = next_prompt(turn), turn, turn.num_kept
    assert before is not None
    await let_go(d, before)
    assert skipped(p) == {}


@pytest.mark.parametrize(
    ("family", "transport"), l_shape(FAMILIES, TRANSPORTS, corner=(FAMILY, "shm"))
)
async def test_what_p_has_stays_and_only_the_rest_moves(
    shared: Cluster, checkpoints: dict[str, Path], family: str, transport: str
) -> None:
    """Of 109 tokens P has 90, five whole blocks; D has all but the new question."""
    config = both_ways(transport, kv_recompute_threshold=1)
    p, d = await pair_of_nodes(shared, checkpoints[family], config)
    one = await shared.start("decode", checkpoints[family], enable_prefix_caching=True)
    first = await take_turn(p, d, prompt_of(90), LONG)
    assert_equal(first.decoded, await generate(one, request_of(first.prompt, LONG)))
    second = await take_turn(p, d, next_prompt(first), LONG, first)
    assert_equal(second.decoded, await generate(one, request_of(second.prompt, LONG)))
    there, back = first.decoded.last.kv_transfer, second.prefilled.last.kv_transfer
    assert there is not None and back is not None
    per_block = there.attention_bytes // 6
    assert (back.attention_bytes, back.state_bytes) == (2 * per_block, there.state_bytes)
    assert (back.prefill_cached_tokens, back.decode_cached_tokens) == (80, 0)
    onward = second.decoded.last.kv_transfer
    assert onward is not None and onward.decode_cached_tokens == 96
    moved = sum(sample(p, "tandem:kv_transfer_bytes_total", kind=k) for k in ("attention", "state"))
    assert moved == sample(p, "tandem:kv_verified_bytes_total")
    assert moved == back.attention_bytes + back.state_bytes
    await let_go(d, second)


@pytest.mark.parametrize("family", everyday(FAMILIES, (FAMILY,)))
async def test_behind_what_was_pulled_the_prompt_goes_on_in_chunks_and_keeps_states(
    shared: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    """Three chunks; the same prompt again starts from the last boundary."""
    p, d = await pair_of_nodes(shared, checkpoints[family], both_ways())
    one = await shared.start("decode", checkpoints[family], enable_prefix_caching=True)
    first = await take_turn(p, d, prompt_of(90), LONG)
    await generate(one, request_of(first.prompt, LONG))
    await forget(p)
    prompt = next_prompt(first, length=170)
    second = await take_turn(p, d, prompt, LONG, first)
    assert_equal(second.decoded, await generate(one, request_of(prompt, LONG)))
    again = await generate(p, request_of(prompt, LONG))
    assert again.last.num_cached_tokens >= (len(prompt) - 1) // 16 * 16
    await let_go(d, second)


@pytest.mark.parametrize(("length", "max_tokens"), l_shape(LENGTHS, ANSWERS, corner=(80, 2)))
async def test_around_block_boundaries(
    shared: Cluster, model: Path, length: int, max_tokens: int
) -> None:
    """The shortest answer that is kept has two tokens; the shortest new question, none but it."""
    p, d = await pair_of_nodes(shared, model, both_ways(kv_recompute_threshold=1))
    one = await shared.start("decode", model, enable_prefix_caching=True)
    sampling = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
    first = await take_turn(p, d, prompt_of(length), sampling)
    await generate(one, request_of(first.prompt, sampling))
    await forget(p)
    second = await take_turn(p, d, first.said, sampling, first)
    assert second.prefilled.last.was_pulled
    assert first.kept.remote_num_tokens == length + max_tokens - 1
    assert_equal(second.decoded, await generate(one, request_of(first.said, sampling)))
    await let_go(d, second)


@pytest.mark.parametrize("family", everyday(FAMILIES, (FAMILY,)))
async def test_a_stop_token_ends_what_is_kept_before_itself(
    shared: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    """The next prompt may leave the stop token out: it belongs to the answer, not to the state."""
    p, d = await pair_of_nodes(shared, checkpoints[family], both_ways())
    one = await shared.start("decode", checkpoints[family], enable_prefix_caching=True)
    prompt = prompt_of(90)
    stop = (await generate(one, request_of(prompt, LONG))).token_ids[7]
    await forget(one)
    sampling = msgspec.structs.replace(LONG, stop_token_ids=(stop,))
    first = await take_turn(p, d, prompt, sampling)
    alone = await generate(one, request_of(prompt, sampling))
    assert_equal(first.decoded, alone)
    assert first.decoded.last.finish_reason is FinishReason.STOP
    assert first.kept.remote_num_tokens == len(first.said) - 1
    await forget(p)
    goes_on = (*first.said[:-1], *prompt_of(25, salt=9))
    second = await take_turn(p, d, goes_on, LONG, first)
    assert second.prefilled.last.was_pulled
    assert_equal(second.decoded, await generate(one, request_of(goes_on, LONG)))
    await let_go(d, second)


@pytest.mark.parametrize("family", everyday(FAMILIES, (FAMILY,)))
async def test_what_d_had_to_compute_again_is_kept_as_well(
    shared: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    damage = DamagedReads(lambda memory, spans: flip(memory, spans[0][1]), times=2)
    p, d = await pair_of_nodes(shared, checkpoints[family], both_ways(), on_d=damage)
    one = await shared.start("decode", checkpoints[family], enable_prefix_caching=True)
    first = await take_turn(p, d, prompt_of(90), LONG)
    assert recomputed(d) == {"verification_failed": 90}
    await forget(p)
    second = await take_turn(p, d, next_prompt(first), LONG, first)
    assert second.prefilled.last.was_pulled
    for turn in (first, second):
        assert_equal(turn.decoded, await generate(one, request_of(turn.prompt, LONG)))
    await let_go(d, second)


async def test_an_answer_of_one_token_is_not_kept(shared: Cluster, model: Path) -> None:
    p, d = await pair_of_nodes(shared, model, both_ways())
    turn = await take_turn(p, d, prompt_of(40), msgspec.structs.replace(GREEDY, max_tokens=1))
    assert turn.decoded.last.kv_transfer_params is None
    await settled(d)


async def test_nothing_is_kept_that_nobody_heard_of_or_asked_for(
    shared: Cluster, model: Path
) -> None:
    """A caller who left, an answer of D's own, and a node without the option."""
    p, d = await pair_of_nodes(shared, model, both_ways())
    off = await shared.start("decode", model)
    for num_taken in (1, 12):
        params = await prefill(p, prompt_of(40))
        stream = d.engine.generate(request_of(prompt_of(40), GREEDY, params))
        for _ in range(num_taken):
            await anext(stream)
        await stream.aclose()
        await settled(d)
    assert (await generate(d, request_of(prompt_of(40)))).last.kv_transfer_params is None
    turn = await take_turn(p, off, prompt_of(40))
    assert turn.decoded.last.kv_transfer_params is None
    stats = turn.decoded.last.kv_transfer
    assert stats is not None and stats.state_bytes > 0, "no threshold holds for remote prefills"
    await settled(d)


@pytest.mark.parametrize(("threshold", "causes"), [(20, {"below_threshold": 1}), (19, {})])
async def test_a_pull_that_saves_too_little_is_not_made(
    shared: Cluster, model: Path, threshold: int, causes: dict[str, float]
) -> None:
    """P has the state after its 90 tokens; D's is 19 further."""
    config = both_ways(kv_recompute_threshold=threshold)
    p, d = await pair_of_nodes(shared, model, config)
    off = await shared.start("decode", model, enable_prefix_caching=True)
    first = await take_turn(p, d, prompt_of(90), LONG)
    prompt = next_prompt(first)
    second = await take_turn(p, d, prompt, LONG, first)
    assert skipped(p) == causes
    stats = second.prefilled.last.kv_transfer
    assert stats is not None
    assert (stats.state_bytes == 0) == bool(causes)
    assert stats.prefill_cached_tokens == (90 if causes else 80)
    await until(lambda: d.engine.core.scheduler.num_held == 1)
    fresh = await generate(off, request_of(prompt, LONG))
    assert count_near_ties([fresh], [second.decoded]) == 0
    await let_go(d, second)


async def test_a_state_that_is_here_beats_the_pull(shared: Cluster, model: Path) -> None:
    """P answered the same question itself: it is as far as D, and further."""
    p, d = await pair_of_nodes(shared, model, both_ways(kv_recompute_threshold=1))
    first = await take_turn(p, d, prompt_of(90), LONG)
    assert_equal(await generate(p, request_of(first.prompt, LONG)), first.decoded)
    second = await take_turn(p, d, next_prompt(first), LONG, first)
    assert second.prefilled.last.num_cached_tokens == first.num_kept
    stats = second.prefilled.last.kv_transfer
    assert stats is not None and stats.attention_bytes == stats.state_bytes == 0
    assert skipped(p) == {"below_threshold": 1}
    await let_go(d, second)


async def test_a_producer_may_pull_and_a_consumer_may_keep(shared: Cluster, model: Path) -> None:
    p = await shared.start("prefill", model, kv_transfer_config=both_ways(role="kv_producer"))
    d = await shared.start("decode", model, kv_transfer_config=both_ways(role="kv_consumer"))
    first = await take_turn(p, d, prompt_of(90), LONG)
    second = await take_turn(p, d, next_prompt(first), LONG, first)
    stats = second.prefilled.last.kv_transfer
    assert stats is not None and stats.state_bytes > 0
    await let_go(d, second)


async def test_short_memory_takes_back_what_nobody_has_claimed(
    shared: Cluster, model: Path
) -> None:
    """D has room for two such turns; the oldest goes, and its next turn is computed on P."""
    config = both_ways(kv_recompute_threshold=1)
    p = await shared.start("prefill", model, kv_transfer_config=config)
    memory = arena_for(model, 130, requests=2)
    d = await shared.start("decode", model, kv_transfer_config=config, kv_cache_memory_bytes=memory)
    turns = [await take_turn(p, d, prompt_of(100, salt), LONG) for salt in range(3)]
    await until(lambda: d.engine.core.scheduler.num_held == 2)
    assert sample(d, "tandem:held_turns_taken_back_total") == 1
    params = turns[0].kept, turns[1].kept
    asked = [request_of(next_prompt(t, 5), LONG, k) for t, k in zip(turns, params, strict=False)]
    lost, found = [await generate(p, request) for request in asked]
    assert not lost.last.was_pulled
    assert found.last.was_pulled
    assert skipped(p) == {"expired": 1}
    for done in (lost, found):
        await end_hold(p, done.last.kv_transfer_params)
    await let_go(d, turns[2])


@pytest.mark.parametrize("family", everyday(FAMILIES, (FAMILY,)))
async def test_what_was_preempted_on_d_is_kept_as_well(
    cluster: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    """Two requests outgrow D; the one that waited ends last, after its output was recomputed."""
    model, config = checkpoints[family], both_ways()
    p, d = await cluster.pair(
        model, config, d={"kv_cache_memory_bytes": arena_for(model, 208, requests=2)}
    )
    one = await cluster.start("decode", model)
    long = msgspec.structs.replace(GREEDY, max_tokens=150)
    prompts = [prompt_of(130, salt) for salt in range(2)]
    turns = await asyncio.gather(*(take_turn(p, d, prompt, long) for prompt in prompts))
    assert d.engine.core.scheduler.stats.num_preemptions
    assert d.engine.core.scheduler.num_held == 1
    (name,) = d.engine.core.scheduler.holds
    (kept,) = [turn for turn in turns if turn.kept.remote_request_id == name]
    second = await take_turn(p, d, next_prompt(kept), LONG, kept)
    assert second.prefilled.last.was_pulled
    count_near_ties([await generate(one, request_of(second.prompt, LONG))], [second.decoded])
    await let_go(d, second)


@pytest.mark.parametrize("tight", [False, True], ids=["roomy", "tight"])
async def test_many_conversations_at_once(
    cluster: Cluster, model: Path, record_property: Callable[[str, object], None], tight: bool
) -> None:
    """Tight: D has room for a few of eight and takes back what it keeps."""
    config = both_ways(kv_recompute_threshold=1)
    memory = arena_for(model, 400) if tight else 16 << 20
    p = await cluster.start("prefill", model, kv_transfer_config=config, enable_prefix_caching=True)
    d = await cluster.start(
        "decode", model, kv_transfer_config=config, kv_cache_memory_bytes=memory
    )
    one = await cluster.start("decode", model)
    prompts = [prompt_of(60 + 7 * salt, salt) for salt in range(8)]

    async def converse(prompt: tuple[int, ...]) -> list[Turn]:
        turns = [await take_turn(p, d, prompt, LONG)]
        for salt in range(2):
            turns.append(await take_turn(p, d, next_prompt(turns[-1], 40, salt), LONG, turns[-1]))
        return turns

    spoken = await asyncio.gather(*map(converse, prompts))
    turns = [turn for conversation in spoken for turn in conversation]
    alone = [await generate(one, request_of(turn.prompt, LONG)) for turn in turns]
    near_ties = count_near_ties(alone, [turn.decoded for turn in turns])
    record_property("near-ties", f"{near_ties} of {24 * 20} tokens")
    num_pulled = sum(turn.prefilled.last.was_pulled for turn in turns)
    num_taken_back = sample(d, "tandem:held_turns_taken_back_total")
    if tight:  # how many of the 16 come back in time is a matter of speed
        assert num_taken_back and num_pulled + skipped(p).get("expired", 0) == 16
    else:
        assert (num_taken_back, num_pulled, skipped(p)) == (0, 16, {})
    await let_go(d, *turns)


def test_plain_remote_decodes_name_nobody() -> None:
    assert not REMOTE_DECODE.is_return_pull
