"""Hash blocks inside larger blocks: what is announced of them, and what is hit."""

from random import Random

import pytest

from engine.errors import ConfigError
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.listener import Cached, CachedBlocks, CachedStates
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
)
from engine.kv_cache.tables import BlockTables
from serving.config import NodeConfig
from tests.support.cache.recount import check_cache, evict_all
from tests.unit.kv_cache.test_kv_cache_policy import serve, text

STATE = KVCacheGroup(MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16)))), (0, 1))
FULL = KVCacheGroup(FullAttentionSpec(1, 16, "float32"), (2,))
WINDOW = KVCacheGroup(SlidingWindowSpec(1, 16, "float32", 24), (3,))
COARSE = KVCacheGroup(FullAttentionSpec(2, 16, "float32"), (4,), 96)
Stored = tuple[Cached, bytes, tuple[int, ...], str | None]


class Heard:
    """Every call of a cache, in order."""

    def __init__(self) -> None:
        self.calls: list[Stored] = []
        self.gone: list[Cached] = []

    def stored(
        self, cached: Cached, parent: bytes, token_ids: tuple[int, ...], *, cache_salt: str | None
    ) -> None:
        self.calls.append((cached, parent, token_ids, cache_salt))

    def removed(self, cached: Cached) -> None:
        self.gone.append(cached)


def cache_of(
    *groups: KVCacheGroup, block_size: int = 64, units: int = 64, heard: Heard | None = None
) -> KVCacheManager:
    unit_bytes = plan_arena(groups, block_size, 1 << 30).unit_bytes
    plan = plan_arena(groups, block_size, units * unit_bytes, hash_block_size=16)
    return KVCacheManager(plan, listener=heard)


def start(cache: KVCacheManager, prefix: PrefixDigests, num_tokens: int) -> BlockTables:
    hit = cache.find_hit(prefix, num_tokens - 1)
    tables = cache.start(hit, num_tokens)
    assert tables is not None
    cache.states.take_new()
    cache.copies_done()
    return tables


def blocks_in(heard: Heard, group: int) -> list[tuple[CachedBlocks, bytes, tuple[int, ...]]]:
    return [
        (cached, parent, tokens)
        for cached, parent, tokens, _ in heard.calls
        if isinstance(cached, CachedBlocks) and cached.group == group
    ]


def test_a_prompt_below_one_block_announces_its_hash_blocks() -> None:
    """62 chained digests and exactly the prompt's tokens, though no block of 2,176 is whole."""
    heard, prompt = Heard(), text(Random(1), 1000)
    cache = cache_of(STATE, FULL, block_size=2176, heard=heard)
    assert serve(cache, prompt) == 0
    prefix = PrefixDigests(cache.hasher, list(prompt), None)
    ((cached, parent, tokens),) = blocks_in(heard, 1)
    assert list(cached.digests) == prefix.boundaries()[1:]
    assert (len(cached.digests), cached.start, cached.end) == (62, 0, 1000)
    assert (parent, tokens, cached.tail) == (prefix.digest_at(0), prompt, prefix.key(1000).digest)
    states = [call for call in heard.calls if isinstance(call[0], CachedStates)]
    assert [cached.end for cached, *_ in states] == [992, 1000]
    # A checkpoint is told with its last hash block, whole or not.
    assert [tokens for _, _, tokens, _ in states] == [prompt[976:992], prompt[992:]]
    assert [parent for _, parent, _, _ in states] == [prefix.digest_at(976), prefix.digest_at(992)]
    # And what was announced is hit.
    assert serve(cache, (*prompt[:992], *text(Random(2), 50))) == 992


def test_a_block_that_fills_up_is_announced_part_by_part_and_goes_as_a_whole() -> None:
    heard, tokens = Heard(), list(text(Random(1), 40))
    cache = cache_of(FULL, heard=heard)
    prefix = PrefixDigests(cache.hasher, tokens, "salt")
    tables = start(cache, prefix, 40)
    cache.keep_loaded(tables, prefix, 40)
    tokens += text(Random(2), 15)
    cache.retire(tables, prefix, 55)
    tokens += text(Random(3), 45)
    assert cache.grow(tables, 100)
    cache.publish(tables, prefix, 100)
    ranges = [(cached.start, cached.end) for cached, *_ in blocks_in(heard, 0)]
    assert ranges == [(0, 40), (32, 55), (48, 64)]
    told = [digest for cached, *_ in blocks_in(heard, 0) for digest in cached.digests]
    assert told == prefix.boundaries()[1:5]
    for (cached, parent, told_tokens), salt in zip(
        blocks_in(heard, 0), [call[3] for call in heard.calls], strict=True
    ):
        assert (parent, salt) == (prefix.digest_at(cached.start), "salt")
        assert told_tokens == tuple(tokens[cached.start : cached.end])
    cache.free(tables)
    evict_all(cache)
    check_cache(cache)
    removed = [cached for cached in heard.gone if isinstance(cached, CachedBlocks)]
    tails = [prefix.key(end).digest for end in (40, 55)]
    assert [cached.tail for cached in removed if cached.tail] == tails
    assert [digest for cached in removed for digest in cached.digests] == told


@pytest.mark.parametrize("groups", [(FULL,), (FULL, COARSE), (WINDOW, FULL)], ids=str)
@pytest.mark.parametrize("length", [37, 64, 100, 128, 200])
def test_a_prompt_that_leaves_inside_a_block_starts_from_a_copy(
    groups: tuple[KVCacheGroup, ...], length: int
) -> None:
    prompt = text(Random(1), length)
    for shared in range(1, length + 1):
        cache = cache_of(*groups)
        serve(cache, prompt)
        # All of a cached prompt is found at its exact end, and otherwise its whole hash blocks.
        ideal = shared if shared == length else shared // 16 * 16
        hit = serve(cache, (*prompt[:shared], *text(Random(2), 5)))
        if WINDOW in groups and hit != ideal:
            # Blocks that the window had passed are gone.
            assert hit < length - 24
            continue
        assert hit == ideal


def test_of_many_blocks_with_one_beginning_the_one_that_agrees_furthest_is_copied() -> None:
    rng = Random(1)
    common, cache = text(rng, 500), cache_of(FULL, block_size=2176, units=40)
    prompts = [common[:end] + text(rng, 600 - end) for end in range(0, 500, 20)]
    for prompt in prompts:
        serve(cache, prompt)
    for number, prompt in enumerate(prompts):
        assert serve(cache, prompt[: 520 + number] + text(rng, 40)) == (520 + number) // 16 * 16


def test_an_end_on_a_hash_boundary_that_is_cached_already_is_not_stored_again() -> None:
    heard, prompt = Heard(), text(Random(1), 48)
    cache = cache_of(FULL, heard=heard)
    prefix = PrefixDigests(cache.hasher, list(prompt), None)
    for end in (48, 32):
        tables = start(cache, PrefixDigests(cache.hasher, [], None), end)
        cache.retire(tables, prefix, end)
        cache.free(tables)
        check_cache(cache)
    assert [(cached.start, cached.end) for cached, *_ in blocks_in(heard, 0)] == [(0, 48)]


def test_what_follows_a_block_goes_before_it() -> None:
    """Of a prefix that prompts share, evicted with all that follows it, in calls for each part."""
    heard, rng = Heard(), Random(1)
    cache, common = cache_of(FULL, block_size=16, heard=heard), text(rng, 64)
    prompts = [common + text(rng, 64) for _ in range(2)]
    prompts.append(prompts[0][:96] + text(rng, 32))
    for prompt in prompts:
        serve(cache, prompt)
    (shared,) = cache.pool.trees[0].root.children.values()
    cache.pool.evict(shared)
    calls = {
        digest: number
        for number, cached in enumerate(heard.gone)
        if isinstance(cached, CachedBlocks)
        for digest in cached.digests
    }
    for prompt in prompts:
        chain = PrefixDigests(cache.hasher, list(prompt), None).boundaries()[1:]
        numbers = [calls[digest] for digest in chain]
        assert numbers == sorted(numbers, reverse=True)
    check_cache(cache)


def groups_of(*sizes: int) -> tuple[KVCacheGroup, ...]:
    spec = FullAttentionSpec(1, 16, "float32")
    return tuple(KVCacheGroup(spec, (layer,), size) for layer, size in enumerate(sizes))


def test_a_hash_block_that_divides_nothing_is_refused_with_one_that_works() -> None:
    for sizes, asked, works in [((24,), 16, 12), ((96, 64), 24, 16), ((7,), 16, 7)]:
        groups = groups_of(*sizes)
        with pytest.raises(ConfigError, match=rf"--hash-block-size {works} does") as refused:
            plan_arena(groups, 24, 1 << 22, hash_block_size=asked)
        assert f"--hash-block-size {asked} does not divide" in str(refused.value)
        plan = plan_arena(groups, 24, 1 << 22, hash_block_size=works)
        assert plan.hash_block_size == works


def test_the_default_hash_block_always_divides_and_has_at_most_sixteen_tokens() -> None:
    for sizes, wanted in [
        ((4,), 4), ((16,), 16), ((64,), 16), ((528,), 16), ((2176,), 16), ((24,), 12), ((20,), 10),
        ((96, 20), 4), ((17,), 1), ((65_536,), 16),
    ]:  # fmt: skip
        plan = plan_arena((STATE, *groups_of(*sizes)), 24, 1 << 28)
        assert plan.hash_block_size == wanted
    # Without attention there is nothing to divide.
    assert plan_arena((STATE,), 24, 1 << 24).hash_block_size == 12
    assert plan_arena((STATE,), 24, 1 << 24, hash_block_size=100).hash_block_size == 100
    assert NodeConfig().hash_block_size is None
