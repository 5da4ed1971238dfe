"""Events of one step that are too many for one batch: cut, in order, with nothing lost."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest

from serving.kv_events.event_log import MAX_BATCH_BYTES, EventLog, batches
from serving.kv_events.wire import AllBlocksCleared, BlockRemoved, BlockStored, Event, decode
from tests.support.cache.announced_cache import AnnouncedCache, Blocks, count

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


def flat(parts: Sequence[Sequence[Event]]) -> list[Event]:
    return [event for part in parts for event in part]


def test_what_is_short_stays_one_batch() -> None:
    events = (SALTED, BlockRemoved(HASHES, "GPU", 3), AllBlocksCleared())
    assert list(batches(events)) == [events]
    assert list(batches(())) == []


def test_a_chain_is_cut_between_its_blocks_and_each_part_names_its_parent() -> None:
    parts = flat(list(batches([SALTED], 1)))
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
    parts = flat(list(batches([BlockRemoved(HASHES, "GPU", 1)], 2048 + 150)))
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
