"""The publisher's log: steps cut into batches, the latest replayed, and the state as a snapshot."""

from collections import Counter
from itertools import chain
from random import Random

import pytest

from serving.kv_events.event_log import (
    MAX_BATCH_BYTES,
    SNAPSHOT_BYTES,
    CacheMirror,
    EventLog,
    batches,
)
from serving.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, decode
from tests.support.cache.announced_cache import (
    FULL,
    SIZE,
    AnnouncedCache,
    Blocks,
    count,
    digest,
)

BLOCK_BYTES = 64 + 4 * SIZE
HASHES = tuple(b"%032d" % number for number in range(7))
SALTED = BlockStored(
    HASHES,
    None,
    tuple(range(14)),
    2,
    medium="GPU",
    extra_keys=(("s",), *[None] * 6),
    group_idx=3,
    kv_cache_spec_kind="sliding_window",
    kv_cache_spec_sliding_window=5,
)


def test_what_is_short_stays_one_batch() -> None:
    events = (SALTED, BlockRemoved(HASHES, "GPU", 3), AllBlocksCleared())
    assert list(batches(events)) == [events]
    assert list(batches(())) == []


def test_a_chain_is_cut_between_its_blocks_and_each_part_names_its_parent() -> None:
    parts = list(chain.from_iterable(batches([SALTED], 1)))
    for number, part in enumerate(parts):
        assert part == BlockStored(
            HASHES[number : number + 1],
            HASHES[number - 1] if number else None,
            (2 * number, 2 * number + 1),
            2,
            medium="GPU",
            extra_keys=(None,) if number else (("s",),),
            group_idx=3,
            kv_cache_spec_kind="sliding_window",
            kv_cache_spec_sliding_window=5,
        )
    assert len(parts) == len(HASHES)


def test_of_a_chain_that_is_cut_the_children_go_first() -> None:
    parts = chain.from_iterable(batches([BlockRemoved(HASHES, "GPU", 1)], 2048 + 150))
    removed = [part.block_hashes for part in parts if isinstance(part, BlockRemoved)]
    assert removed == [HASHES[5:], HASHES[3:5], HASHES[1:3], HASHES[:1]]


@pytest.mark.parametrize("most", [1, 2300, 5000, 20_000])
def test_all_parts_together_say_what_the_whole_said(most: int) -> None:
    random, cache = Random(most), AnnouncedCache()
    heard: Blocks = Counter()
    for _ in range(60):
        step = [event for _ in range(5) for event in cache.change(random)]
        for batch in batches(step, most):
            count(heard, batch)
        assert heard == cache.held


def test_a_step_of_any_size_is_published_in_batches_that_consumers_take() -> None:
    """Token ids of 5 bytes, the longest salt, and an event that no batch could hold."""
    size, count_ = 16, 200_000
    hashes = tuple(b"%032d" % number for number in range(count_))
    extra = (("\U0001f300" * 256,), *[None] * (count_ - 1))
    log = EventLog("one", form="map", buffer_steps=1, max_queue_size=99)
    ids = (2**31,) * (size * count_)
    stored = BlockStored(hashes, None, ids, size, extra_keys=extra, group_idx=0)
    log.append([stored, BlockRemoved(hashes, "GPU", 0)])
    sent = list(iter(log.take, None))
    assert [each.sequence for each in sent] == list(range(len(sent)))
    assert max(len(each.payload) for each in sent) <= MAX_BATCH_BYTES
    heard: Blocks = Counter()
    tokens = 0
    for each in sent:
        events = decode(each.payload).events
        tokens += sum(len(e.token_ids) for e in events if isinstance(e, BlockStored))
        count(heard, (e for e in events if isinstance(e, BlockStored)))
    assert (heard.total(), tokens) == (count_, size * count_)


def test_only_the_latest_batches_are_repeated() -> None:
    log = EventLog("one", form="map", buffer_steps=3, max_queue_size=9)
    for _ in range(6):
        log.append((SALTED,))
    while log.take():
        pass
    assert [each.sequence for each in log.replay(0)] == [4, 5, 6]
    assert [each.sequence for each in log.replay(6)] == [6]
    assert list(log.replay(7)) == []


# --- the snapshot --------------------------------------------------------------------------------


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
    parts = list(chain.from_iterable(mirror.copy().drain(256 * BLOCK_BYTES)))
    assert [len(event.block_hashes) for event in parts] == [256] * 3 + [232]
    tokens = [token for event in parts for token in event.token_ids]
    assert tuple(tokens) == text


def test_no_piece_of_a_snapshot_grows_with_the_block_size() -> None:
    mirror, size = CacheMirror(), 65_536
    hashes = tuple(b"%032d" % number for number in range(5))
    mirror.apply([BlockStored(hashes, None, (7,) * (5 * size), size, group_idx=0)])
    parts = list(mirror.drain(SNAPSHOT_BYTES))
    assert [event.block_hashes for event in chain.from_iterable(parts)] == [
        (each,) for each in hashes
    ]
    assert len(parts) == 5
