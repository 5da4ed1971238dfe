"""Events of a cache and their snapshot: each copy once, parents first, exactly their tokens."""

from collections import Counter
from random import Random

import pytest

from engine.kv_cache.listener import CachedBlocks, CachedStates
from serving.kv_events.event_log import SNAPSHOT_BYTES, CacheMirror
from serving.kv_events.recorder import EventRecorder
from serving.kv_events.wire import BlockRemoved, BlockStored, Event
from tests.support.cache.announced_cache import (
    FULL,
    GROUPS,
    SIZE,
    AnnouncedCache,
    Blocks,
    count,
    digest,
)

BLOCK_BYTES = 64 + 4 * SIZE
D = [b"%032d" % n for n in range(8)]


def stored_in(
    cached: CachedBlocks | CachedStates,
    parent: bytes,
    tokens: tuple[int, ...],
    salt: str | None = None,
) -> list[Event]:
    recorder = EventRecorder(GROUPS, SIZE)
    recorder.stored(cached, parent, tokens, cache_salt=salt)
    return recorder.take()


def test_blocks_are_announced_by_hash_block_with_their_tokens() -> None:
    (event,) = stored_in(CachedBlocks(2, 4, 8, (D[1], D[2]), (7,)), D[0], (1, 2, 3, 4))
    assert event == BlockStored(
        (D[1], D[2]),
        D[0],
        (1, 2, 3, 4),
        2,
        medium="GPU",
        group_idx=2,
        kv_cache_spec_kind="sliding_window",
        kv_cache_spec_sliding_window=5,
    )


def test_the_first_block_of_a_prompt_has_no_parent_and_names_the_salt() -> None:
    (event,) = stored_in(CachedBlocks(0, 0, 4, (D[1], D[2]), (7,)), D[0], (1, 2, 3, 4), "s")
    assert isinstance(event, BlockStored)
    assert (event.parent_block_hash, event.extra_keys) == (None, (("s",), None))
    (later,) = stored_in(CachedBlocks(0, 4, 6, (D[3],), (7,)), D[2], (5, 6), "s")
    assert isinstance(later, BlockStored)
    assert (later.parent_block_hash, later.extra_keys) == (D[2], None)


def test_tokens_after_the_last_hash_boundary_are_not_announced() -> None:
    (event,) = stored_in(CachedBlocks(0, 0, 5, (D[1], D[2]), (7,)), D[0], (1, 2, 3, 4, 5))
    assert isinstance(event, BlockStored)
    assert (event.token_ids, event.block_size) == ((1, 2, 3, 4), 2)
    assert stored_in(CachedBlocks(0, 4, 5, (), (7,)), D[2], (5,)) == []


def test_a_block_that_lacks_its_front_is_not_announced() -> None:
    lacking = CachedBlocks(2, 2, 4, (D[2],), (7,), filled_from=1)
    assert stored_in(lacking, D[1], (3, 4)) == []
    recorder = EventRecorder(GROUPS, SIZE)
    recorder.removed(lacking)
    assert recorder.take() == []


@pytest.mark.parametrize("tokens", [(5,), (5, 6)])
def test_a_checkpoint_is_one_block_in_each_mamba_group(tokens: tuple[int, ...]) -> None:
    events = stored_in(CachedStates((1, 3), 4 + len(tokens), D[3], (0, 0)), D[2], tokens)
    assert [event.group_idx for event in events if isinstance(event, BlockStored)] == [1, 3]
    for event in events:
        assert isinstance(event, BlockStored)
        assert (event.block_hashes, event.parent_block_hash) == ((D[3],), D[2])
        assert (event.token_ids, event.block_size) == (tokens, len(tokens))
        assert event.kv_cache_spec_kind == "mamba"


def test_removals_are_announced() -> None:
    recorder = EventRecorder(GROUPS, SIZE)
    recorder.removed(CachedStates((1, 3), 5, D[3], (0, 0)))
    recorder.removed(CachedBlocks(0, 0, 4, (D[1], D[2]), (7,)))
    recorder.removed(CachedBlocks(0, 4, 5, (), (8,)))
    assert recorder.take() == [
        BlockRemoved((D[3],), "GPU", 1),
        BlockRemoved((D[3],), "GPU", 3),
        BlockRemoved((D[1], D[2]), "GPU", 0),
    ]
    assert recorder.take() == []


@pytest.mark.parametrize("most", [1, 100, 200, 100_000])
@pytest.mark.parametrize("seed", range(6))
def test_a_snapshot_makes_the_state_that_the_events_made(seed: int, most: int) -> None:
    random, cache, mirror = Random(seed), AnnouncedCache(), CacheMirror()
    for _ in range(150):
        mirror.apply(cache.change(random))
        state = mirror.copy()
        heard: Blocks = Counter()
        for events in state.drain(most):
            assert sum(map(size_of, events)) < 2 * most + BLOCK_BYTES
            for event in events:
                check(event, heard)
        assert heard == cache.held
        assert state.num_blocks == 0
    assert mirror.num_blocks == len(cache.held)


def size_of(event: BlockStored) -> int:
    return 64 * len(event.block_hashes) + 4 * len(event.token_ids)


def check(event: BlockStored, heard: Blocks) -> None:
    """It is what a store would have said, and its parent is known if it ever was."""
    size, parent = event.block_size, event.parent_block_hash
    assert len(event.token_ids) == size * len(event.block_hashes)
    known = {place[2] for place in heard if place[0] == event.group_idx}
    if event.group_idx == FULL:
        assert parent is None or parent in known
    if event.kv_cache_spec_kind == "mamba":
        assert len(event.block_hashes) == 1
    if parent is None:
        salt = event.extra_keys[0][0] if event.extra_keys and event.extra_keys[0] else None
        for place, each in enumerate(event.block_hashes, 1):
            assert each == digest(salt, event.token_ids[: place * size])
    count(heard, [event])


def test_a_copy_of_the_state_stays_as_it_is() -> None:
    random, cache, mirror = Random(7), AnnouncedCache(), CacheMirror()
    mirror.apply([event for _ in range(50) for event in cache.change(random)])
    before, copied = cache.held, mirror.copy()
    mirror.apply([event for _ in range(50) for event in cache.change(random)])
    heard: Blocks = Counter()
    for events in copied.drain(300):
        count(heard, events)
    assert heard == before != cache.held


def test_long_prompts_come_back_as_few_events() -> None:
    cache, mirror = AnnouncedCache(), CacheMirror()
    text = tuple(range(2_000))
    for end in range(100, 2_001, 100):
        cache.store(text[:end], end - 100)
    mirror.apply(cache.recorder.take())
    batches = list(mirror.copy().drain(256 * BLOCK_BYTES))
    assert [len(event.block_hashes) for events in batches for event in events] == [256] * 3 + [232]
    tokens = [token for events in batches for event in events for token in event.token_ids]
    assert tuple(tokens) == text


def test_no_piece_of_a_snapshot_grows_with_the_block_size() -> None:
    mirror, size = CacheMirror(), 65_536
    hashes = tuple(b"%032d" % number for number in range(5))
    mirror.apply([BlockStored(hashes, None, (7,) * (5 * size), size, group_idx=0)])
    batches = list(mirror.drain(SNAPSHOT_BYTES))
    assert [event.block_hashes for events in batches for event in events] == [
        (each,) for each in hashes
    ]
    assert len(batches) == 5
