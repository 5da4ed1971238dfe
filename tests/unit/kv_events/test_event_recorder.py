"""Changes of a cache as events: each hash block with its parent and exactly its tokens."""

import pytest

from engine.kv_cache.listener import CachedBlocks, CachedStates
from serving.kv_events.recorder import EventRecorder
from serving.kv_events.wire import CPU, AllBlocksCleared, BlockRemoved, BlockStored, Event
from tests.support.cache.announced_cache import GROUPS, SIZE

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


def test_an_arena_is_cleared_by_one_event_unless_a_tier_still_has_something() -> None:
    recorder, block = EventRecorder(GROUPS, SIZE), CachedBlocks(0, 0, 2, (D[1],), (7,))
    recorder.stored(block, D[0], (1, 2), cache_salt=None)
    recorder.removed(block)
    recorder.stored_in(CPU, block, parent=D[0], token_ids=(1, 2), cache_salt=None)
    recorder.cleared()
    assert AllBlocksCleared() not in recorder.take()
    recorder.removed_from(CPU, block)
    recorder.cleared()
    assert recorder.take() == [AllBlocksCleared()]
