"""The order of eviction when room is needed, seen from outside: by what can still be found."""

from itertools import count
from random import Random

import pytest

from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.coverage import Coverage
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, StatePart, form_groups
from tests.support.cache.recount import check_cache
from tests.unit.kv_cache.test_kv_cache_policy import BLOCK, Tokens, serve, text

ATTENTION = FullAttentionSpec(1, 16, "float32")
STATE = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
BLOCKS_ONLY = form_groups(((ATTENTION,),))
HYBRID = form_groups(((STATE,), (STATE,), (ATTENTION,)))
FEW_STATES = 6
FOREVER = 2000


def cache_with(groups: tuple[KVCacheGroup, ...], units: int, share: float = 1.0) -> KVCacheManager:
    size = plan_arena(groups, BLOCK, 1 << 22).unit_bytes
    return KVCacheManager(plan_arena(groups, BLOCK, units * size), checkpoint_share=share)


def cache_of_blocks(blocks: int) -> KVCacheManager:
    """Attention only; the blocks must fill whole units."""
    per_unit = cache_with(BLOCKS_ONLY, 2).plan.blocks_per_unit[0]
    assert blocks % per_unit == 0
    return cache_with(BLOCKS_ONLY, blocks // per_unit)


def cache_of_few_states() -> KVCacheManager:
    """Room for everything but checkpoints."""
    return cache_with(HYBRID, 600, FEW_STATES / 600)


def found(cache: KVCacheManager, tokens: Tokens) -> int:
    """How much of `tokens` a longer prompt could start from; looking changes nothing."""
    return cache.find_hit(PrefixDigests(cache.hasher, list(tokens), None), len(tokens)).num_tokens


@pytest.mark.parametrize("lost", [1, 2, 8, 15, 16, 17, 23])
def test_the_end_of_a_chain_goes_before_its_root(lost: int) -> None:
    rng, cache = Random(1), cache_of_blocks(32)
    chain = text(rng, 24 * BLOCK)
    serve(cache, chain)
    assert found(cache, chain) == 24 * BLOCK
    serve(cache, text(rng, (8 + lost) * BLOCK))
    assert found(cache, chain) == (24 - lost) * BLOCK


def test_of_two_chains_the_one_not_hit_again_goes() -> None:
    for used in (0, 1):
        rng, cache = Random(1), cache_of_blocks(32)
        chains = [text(rng, 12 * BLOCK) for _ in range(2)]
        for chain in chains:
            serve(cache, chain)
        assert serve(cache, (*chains[used], 1)) == 12 * BLOCK
        serve(cache, text(rng, (7 + 6) * BLOCK))
        assert found(cache, chains[used]) == 12 * BLOCK
        assert found(cache, chains[1 - used]) == 6 * BLOCK


def test_what_is_in_use_stays_and_a_start_that_fails_evicts_nothing() -> None:
    rng, cache = Random(1), cache_of_blocks(32)
    shared, idle = text(rng, 10 * BLOCK), text(rng, 10 * BLOCK)
    serve(cache, shared)
    prefix = PrefixDigests(cache.hasher, [*shared, *text(rng, BLOCK)], None)
    tables = cache.start(cache.find_hit(prefix, 11 * BLOCK), 11 * BLOCK)
    assert tables is not None
    serve(cache, idle, live=[tables])
    nothing = cache.find_hit(PrefixDigests(cache.hasher, [], None), 0)
    assert cache.start(nothing, 22 * BLOCK) is None
    assert (found(cache, shared), found(cache, idle)) == (10 * BLOCK, 10 * BLOCK)
    serve(cache, text(rng, 21 * BLOCK), live=[tables])
    assert (found(cache, shared), found(cache, idle)) == (10 * BLOCK, 0)
    cache.free(tables)
    check_cache(cache)


def test_a_checkpoint_in_use_between_others_stays_however_many_come() -> None:
    rng, cache = Random(1), cache_of_few_states()
    used, unused = text(rng, 33), text(rng, 33)
    serve(cache, used)
    serve(cache, unused)
    for number in range(50):
        assert serve(cache, (*used, number)) >= 32
        serve(cache, text(rng, 33))
    assert found(cache, unused) == 0


def outlived(length: int) -> int:
    """How many prompts of 33 tokens pass before the checkpoint of one of `length` goes."""
    rng, cache = Random(1), cache_of_few_states()
    prompt = text(rng, length)
    serve(cache, prompt)
    for number in count():
        if found(cache, prompt) < length - BLOCK:
            return number
        assert number < FOREVER, f"the checkpoint of {length} tokens never goes"
        serve(cache, text(rng, 33))
    raise AssertionError("unreachable")


def test_a_checkpoint_outlives_more_the_more_it_saves_but_not_for_ever() -> None:
    """As old as the others and as large, it saves more tokens; recency ends that too."""
    short, long, longest = outlived(33), outlived(330), outlived(660)
    assert short <= FEW_STATES
    assert 3 * short < long
    assert 1.5 * long < longest


@pytest.mark.parametrize("lost", [1, 2, 3])
def test_whole_units_go_from_the_end_of_a_chain(lost: int) -> None:
    """A state needs a unit; the chain's last blocks give way, not its root."""
    cache = cache_with(HYBRID, 8, share=0.0)
    per_unit = cache.plan.blocks_per_unit[1]
    chain = text(Random(1), 7 * per_unit * BLOCK)
    serve(cache, chain)
    nothing = cache.find_hit(PrefixDigests(cache.hasher, [], None), 0)
    live = [cache.start(nothing, 0) for _ in range(1 + lost)]
    prefix = PrefixDigests(cache.hasher, list(chain), None)
    elsewhere = Coverage.of(len(chain), (len(chain),))
    hit = cache.find_hit(prefix, len(chain), elsewhere)
    assert hit.num_local == (7 - lost) * per_unit * BLOCK
    for tables in live:
        assert tables is not None
        cache.free(tables)
    check_cache(cache)
