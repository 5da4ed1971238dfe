"""Chunks of blocks that are filled in pieces, however they are cut; and their bytes in a tier."""

from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.connector import warn_of_long_chunks
from connector.offload.index import ItemIndex
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.listener import CachedBlocks
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.report import content_report, prompt_bytes, tier_report
from engine.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheGroup,
    LatentAttentionSpec,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
)

BLOCK, HASH_BLOCK = 64, 16
GROUP = KVCacheGroup(FullAttentionSpec(1, 8, "float32"), layers=(0,))
PLAN = plan_arena((GROUP,), BLOCK, 1 << 20, hash_block_size=HASH_BLOCK)
PREFIX = PrefixDigests(PrefixHasher(HASH_BLOCK, "seed"), list(range(3, 203)), None)


def stored(start: int, end: int) -> CachedBlocks:
    """The cache's report that it holds more of its blocks: from a hash boundary on."""
    boundaries = PREFIX.boundaries()[start // HASH_BLOCK + 1 : end // HASH_BLOCK + 1]
    blocks = tuple(range(start // BLOCK, -(-end // BLOCK)))
    tail = PREFIX.digest_at(end) if end % HASH_BLOCK else None
    return CachedBlocks(0, start, end, tuple(boundaries), blocks, tail)


@given(st.sampled_from([16, 32, 64]), st.sets(st.integers(1, 200), min_size=1, max_size=12))
def test_every_item_knows_its_hash_boundaries(chunk: int, ends: set[int]) -> None:
    chunks = ChunkPlan(PLAN, chunk)
    index = ItemIndex(chunks)
    start = 0
    for end in sorted(ends):
        cached, parent = stored(start, end), PREFIX.boundaries()[start // HASH_BLOCK]
        preceding = chunks.preceding(cached, parent)
        before = () if preceding is None else index.boundaries_before(preceding)
        for item, place in chunks.items_of(cached, parent, before):
            assert place.blocks == (item.start // BLOCK,)
            index.add(item)
        start = end // HASH_BLOCK * HASH_BLOCK
    items = [entry.item for entry in index]
    assert max(item.end for item in items) == max(ends)
    for item in items:
        assert item.digest == PREFIX.digest_at(item.end)
        first, last = item.start // HASH_BLOCK, -(-item.end // HASH_BLOCK)
        assert item.boundaries == tuple(PREFIX.boundaries()[first:last])


def test_a_tier_is_planned_by_what_its_items_need() -> None:
    items = [item for item, _ in ChunkPlan(PLAN).items_of(stored(0, 200), PREFIX.boundaries()[0])]
    wanted = {item.start: item for item in sorted(items, key=lambda item: item.end)}
    nbytes = sum(map(ChunkPlan(PLAN).nbytes, wanted.values()))
    assert prompt_bytes(PLAN, 200) == nbytes == 200 * 2 * 8 * 4
    assert f"{3:>9,} prompts of 200 tokens, {nbytes:,} bytes each" in tier_report(
        PLAN, 3 * nbytes + 1, 200
    )
    window = KVCacheGroup(SlidingWindowSpec(1, 8, "float32", window=40), layers=(1,))
    both = plan_arena((GROUP, window), BLOCK, 1 << 20, hash_block_size=HASH_BLOCK)
    kept = 200 - (200 + 1 - 40) // BLOCK * BLOCK  # from the block of the window's first token on
    assert prompt_bytes(both, 200) == nbytes + kept * 2 * 8 * 4


def test_a_token_of_a_latent_is_one_row_in_each_layer() -> None:
    """A chunk is cut out of a block row by row: with K and V there are two for each head."""
    latent = KVCacheGroup(LatentAttentionSpec(1, 24, "float32"), layers=(0, 2))
    plan = plan_arena((latent,), BLOCK, 1 << 20, hash_block_size=HASH_BLOCK)
    assert ChunkPlan(plan, 16).rows(0) == (2, 24 * 4)


def test_what_a_model_keeps_and_hands_over_is_written_down() -> None:
    state = MambaSpec("mamba2", (StatePart((3, 64), "bfloat16"), StatePart((2, 8, 16))))
    groups = (
        KVCacheGroup(FullAttentionSpec(2, 16, "bfloat16"), layers=(0, 2, 4)),
        KVCacheGroup(SlidingWindowSpec(1, 16, "bfloat16", window=100), layers=(1,)),
        KVCacheGroup(LatentAttentionSpec(1, 40, "bfloat16"), layers=(3,)),
        KVCacheGroup(state, layers=(5, 6)),
    )
    plan = plan_arena(groups, 16, 1 << 20)
    # Of the window, from the block of token 4096 + 1 - 100 on; a token has K and V, or a latent.
    window = 4096 - 3997 // 16 * 16
    attention = 4096 * (3 * 2 * 2 * 16 * 2 + 40 * 2) + window * 2 * 16 * 2
    states = 2 * (512 + 1024)
    assert content_report(plan, 10_000).splitlines() == [
        "group 0, attention, 3 layers: 384 bytes a token",
        "group 1, attention, window 100, 1 layers: 64 bytes a token",
        "group 2, latent attention, 1 layers: 80 bytes a token",
        f"group 3, mamba2 state, 2 layers: {states:,} bytes a sequence; in each:",
        "    [3, 64]              bfloat16              512",
        "    [2, 8, 16]           float32             1,024",
        f"a hand-over of 4,096 tokens: {attention + states:,} bytes,",
        f"    {attention:,} of attention and {states:,} of states",
    ]
    # Whole blocks move: all of the window's seven.
    whole = 112 * (3 * 2 * 2 * 16 * 2 + 40 * 2 + 2 * 16 * 2)
    assert f"a hand-over of 100 tokens: {whole + states:,} bytes," in content_report(plan, 100)


def test_chunks_that_no_prompt_fills_are_warned_of() -> None:
    with capture_logs() as logs:
        warn_of_long_chunks(ChunkPlan(PLAN), max_model_len=BLOCK)
    assert not logs
    with capture_logs() as logs:
        warn_of_long_chunks(ChunkPlan(PLAN), max_model_len=BLOCK - 1)
    (said,) = logs
    assert (said["chunk_tokens"], said["max_model_len"], said["hybrid_chunk_size"]) == (64, 63, 16)
