"""Promises of the checkpoint policy and the two-level allocator, request by request."""

from collections.abc import Sequence
from hashlib import sha256
from random import Random

import pytest

from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.checkpoints import CheckpointPolicy, Reason, due, value_per_token
from engine.kv_cache.manager import KVCacheManager
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, StatePart
from engine.kv_cache.tables import BlockTables
from tests.support.cache.recount import check_cache

BLOCK = 16
STATE = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
GROUPS = (KVCacheGroup(STATE, (0, 1)), KVCacheGroup(FullAttentionSpec(1, 16, "float32"), (2,)))
Tokens = tuple[int, ...]


def cache_of(units: int, share: float = 0.5) -> KVCacheManager:
    size = plan_arena(GROUPS, BLOCK, 1 << 22).unit_bytes
    return KVCacheManager(plan_arena(GROUPS, BLOCK, units * size), checkpoint_share=share)


def serve(
    cache: KVCacheManager, tokens: Tokens, *, chunk: int = 4096, live: Sequence[BlockTables] = ()
) -> int:
    """One prompt from arrival to its end, as the scheduler does it; returns the hit.

    `live`: all that else is in use.
    """
    prefix = PrefixDigests(cache.hasher, list(tokens), None)
    hit = cache.find_hit(prefix, len(tokens) - 1)
    tables = cache.start(hit, min(hit.num_tokens + chunk, len(tokens)))
    assert tables is not None
    cache.plan_checkpoints(tables, hit, len(tokens))
    for start in range(hit.num_tokens, len(tokens), chunk):
        end = min(start + chunk, len(tokens))
        assert cache.grow(tables, end)
        kept = cache.reserve_checkpoints(prefix, due(tables.checkpoints, start, end))
        cache.states.take_new()
        cache.copies_done()
        cache.publish(tables, prefix, end)
        cache.publish_checkpoints(tables, kept)
    cache.retire(tables, prefix, len(tokens))
    cache.free(tables)
    check_cache(cache, live)
    return hit.num_tokens


def text(rng: Random, length: int) -> Tokens:
    return tuple(rng.randrange(50_000) for _ in range(length))


@pytest.mark.parametrize("tail", range(1, 41))
def test_the_one_token_sweep(tail: int) -> None:
    """A prompt that extends a served one, and a third one that shares a prefix with two."""
    for shared in range(1, 3 * BLOCK + 3):
        rng = Random(100 * shared + tail)
        cache, prefix = cache_of(64), text(rng, shared)
        serve(cache, prefix)
        ideal = shared
        assert serve(cache, prefix + text(rng, tail)) > ideal - BLOCK
        other = cache_of(64)
        for _ in range(2):
            serve(other, prefix + text(rng, tail))
        assert serve(other, prefix + text(rng, tail)) > ideal - BLOCK


def test_the_second_sighting_of_a_long_shared_prefix_hits() -> None:
    rng = Random(1)
    cache, shared = cache_of(2000), text(rng, 20_000)
    assert serve(cache, shared + text(rng, 300)) == 0
    assert serve(cache, shared + text(rng, 200)) == 20_288 - 2048
    assert serve(cache, shared + text(rng, 100)) == 20_000


def test_a_prefix_with_a_long_tail_behind_it_is_not_lost_either() -> None:
    rng = Random(1)
    cache, shared = cache_of(4000), text(rng, 17_008)
    assert serve(cache, shared + text(rng, 9000)) == 0
    assert serve(cache, shared + text(rng, 3000)) == 16_384
    assert serve(cache, shared + text(rng, 100)) == 17_008


def test_positions_are_last_branch_point_tail_and_strides_behind_the_hit() -> None:
    def positions(hit: int, branch_point: int, length: int, size: int = 16) -> Tokens:
        return tuple(CheckpointPolicy().positions(hit, branch_point, length, block_size=size))

    assert positions(0, 0, 12) == ()
    assert positions(0, 0, 32) == (16,)
    assert positions(0, 0, 33) == (32,)
    assert positions(0, 0, 20_000) == (16_384, 17_936, 19_984)
    assert positions(0, 0, 40_000) == (16_384, 32_768, 37_936, 39_984)
    assert positions(16_384, 17_000, 20_000) == (17_000, 17_936, 19_984)
    assert positions(18_000, 18_000, 20_000) == (19_984,)
    assert positions(0, 0, 20_000, 528) == (31 * 528, 33 * 528, 37 * 528)
    assert positions(32, 32, 40) == ()
    assert due((16, 32, 48), 16, 32) == (32,)


def test_what_is_evicted_unread_is_kept_no_more_but_tried_again() -> None:
    """Three states per prompt, then the end's alone and one try in 8, until one is found."""
    policy = CheckpointPolicy()

    def reasons() -> list[Reason]:
        return list(policy.positions(0, 0, 20_000, block_size=16).values())

    assert reasons() == [Reason.INTERVAL, Reason.TAIL, Reason.LAST]
    policy.found(Reason.END, 5000)
    for reason in (Reason.INTERVAL, Reason.TAIL, Reason.LAST):
        for _ in range(30):
            policy.evicted_unread(reason)
    tried = [reason for _ in range(32) for reason in reasons()]
    assert len(tried) == 12, "one chance in 8 of 96"
    for _ in range(40):
        policy.found(Reason.TAIL, 18_000)
    assert reasons()[0] is Reason.TAIL


def test_branch_points_are_kept_whatever_was_evicted() -> None:
    policy = CheckpointPolicy()
    policy.found(Reason.END, 5000)
    for _ in range(100):
        policy.evicted_unread(Reason.BRANCH)
    assert policy.positions(0, 800, 1600, block_size=16)[800] is Reason.BRANCH


def test_conversations_in_little_memory_soon_keep_their_ends_alone() -> None:
    """Each prompt goes on once from its exact end, and no state before an end is ever found."""
    cache, rng = cache_of(60), Random(3)
    for _ in range(100):
        prompt = text(rng, 100)
        serve(cache, prompt)
        assert serve(cache, prompt + text(rng, 50)) == 100
    prefix = PrefixDigests(cache.hasher, list(text(rng, 100)), None)
    tables = cache.start(hit := cache.find_hit(prefix, 99), 100)
    assert tables is not None
    planned = []
    for _ in range(32):
        cache.plan_checkpoints(tables, hit, 100)
        planned.append(len(tables.checkpoints))
    assert sum(planned) == 4, "tried every 8th time"
    cache.free(tables)


def test_the_least_valuable_checkpoint_goes_first() -> None:
    """Recompute saved per byte decides among equally old states, recency among equal ones."""
    cache, rng = cache_of(64, share=0.07), Random(2)
    long, short, newest = text(rng, 320), text(rng, 33), text(rng, 33)
    for prompt in (long, short, newest):
        serve(cache, prompt)
    assert len(cache.pool.idle_checkpoints.members) <= 4
    assert serve(cache, (*long, 1)) >= 304
    assert value_per_token(cache.plan) > 0


@pytest.mark.parametrize("units", [400])
def test_units_follow_the_workload_and_back(units: int) -> None:
    """Many short chats, then few long prompts, then chats again: the same memory serves all."""
    cache = cache_of(units)
    for phase in ("short", "long", "short"):
        live: list[tuple[BlockTables, PrefixDigests]] = []
        length = 12 if phase == "short" else 16 * 30
        while True:
            prefix = PrefixDigests(cache.hasher, list(range(length)), f"{phase}{len(live)}")
            tables = cache.start(cache.find_hit(prefix, length - 1), length)
            if tables is None:
                break
            cache.states.take_new()
            live.append((tables, prefix))
        assert cache.usage >= 0.95, phase
        for tables, prefix in live:
            cache.retire(tables, prefix, length)
            cache.free(tables)
        check_cache(cache)
    assert cache.usage == 0


def test_a_large_block_is_the_inflated_layout() -> None:
    """One block per unit, as upstream: everything works, only coarser."""
    big = KVCacheGroup(FullAttentionSpec(1, 16, "float32"), (2,), 512)
    size = plan_arena((GROUPS[0], big), 512, 1 << 26).unit_bytes
    plan = plan_arena((GROUPS[0], big), 512, 20 * size, hash_block_size=512)
    assert plan.blocks_per_unit == (1, 1)
    cache = KVCacheManager(plan)
    prefix = PrefixDigests(cache.hasher, list(range(1000)), None)
    tables = cache.start(cache.find_hit(prefix, 999), 1000)
    assert tables is not None
    cache.retire(tables, prefix, 1000)
    cache.free(tables)
    assert cache.find_hit(prefix, 999).num_tokens == 0
    assert cache.find_hit(prefix, 1000).num_tokens == 1000


def test_salt_and_seed_separate_equal_text() -> None:
    tokens = list(range(40))
    digests = {
        digest
        for seed in ("", "x")
        for salt in (None, "", "a")
        for digest in PrefixDigests(PrefixHasher(16, seed), tokens, salt).boundaries()
    }
    assert len(digests) == 2 * 3 * 3


def test_digests_are_the_same_on_every_machine() -> None:
    prefix = PrefixDigests(PrefixHasher(4), [1, 2, 3, 4, 5], None)
    text = b"".join(token.to_bytes(4, "little") for token in (1, 2, 3, 4))
    root = sha256(b"").digest() + sha256(b"").digest()
    assert prefix.boundaries() == [sha256(root).digest(), sha256(root + text).digest()]


def test_one_digest_for_prefixes_of_any_length_and_any_hash_block() -> None:
    """Grown in between, and also where the running hash has long passed."""
    tokens = [7 * i % 1000 for i in range(5000)]
    hasher = PrefixHasher(16, "seed")
    prefix = PrefixDigests(hasher, known := tokens[:3000], "salt")
    prefix.boundaries()
    known += tokens[3000:]
    for num_tokens in (0, 1, 16, 1023, 1024, 1025, 2999, 3000, 4095, 4999, 5000):
        digest = PrefixHasher(64, "seed").digest(tokens[:num_tokens], "salt")
        assert prefix.digest_at(num_tokens) == prefix.key(num_tokens).digest == digest
    assert hasher.digest(tokens, None) != digest


class UnhashedPrefix(PrefixDigests):
    """A prefix whose digests nobody may ask for."""

    def boundaries(self) -> list[bytes]:
        raise AssertionError("digests were asked for")


def test_without_prefix_caching_nothing_is_hashed_or_found() -> None:
    size = plan_arena(GROUPS, BLOCK, 1 << 22).unit_bytes
    cache = KVCacheManager(plan_arena(GROUPS, BLOCK, 16 * size), prefix_caching=False)
    prefix = UnhashedPrefix(cache.hasher, list(range(100)), None)
    for _ in range(2):
        hit = cache.find_hit(prefix, 99)
        assert hit.num_tokens == 0
        tables = cache.start(hit, 100)
        assert tables is not None
        assert cache.reserve_checkpoints(prefix, (96,)) == ()
        cache.keep_loaded(tables, prefix, 100)
        cache.retire(tables, prefix, 100)
        cache.free(tables)
    check_cache(cache)
    assert cache.pool.units.num_free_units == 16
