"""Chunks of blocks that are filled in pieces, however they are cut."""

from hypothesis import given
from hypothesis import strategies as st

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.index import ItemIndex
from engine.kv_cache.listener import CachedBlocks
from engine.kv_cache.plan import plan_arena
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup

BLOCK, HASH_BLOCK = 64, 16
GROUP = KVCacheGroup(FullAttentionSpec(1, 8, "float32"), layers=(0,))
PLAN = plan_arena((GROUP,), BLOCK, 1 << 20, hash_block_size=HASH_BLOCK)
PREFIX = PrefixDigests(PrefixHasher(HASH_BLOCK, "seed"), list(range(3, 203)), None)


def stored(start: int, end: int) -> CachedBlocks:
    """What the cache says when it holds more of its blocks: from a hash boundary on."""
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
