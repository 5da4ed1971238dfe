"""From tokens to byte spans: every byte at its place, few spans where both sides are cut alike.

P's arena is filled with numbers that say what each byte is; the spans are copied; then D's arena
must say the same at the places where D's own layout wants it.
"""

from collections.abc import Iterator
from random import Random

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from connector.pd.decode.pull_plan import PullPlan, pair_up, plan_pull
from connector.pd.layout import Piece, SequenceBlocks, blocks_announced, blocks_here
from connector.pd.wire.geometry import geometry_of
from connector.transports.base import SpanPair
from engine.errors import TransportError
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.spec import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
)

STATE = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
FULL = FullAttentionSpec(num_kv_heads=2, head_dim=4, dtype="float32")
WINDOW = SlidingWindowSpec(num_kv_heads=1, head_dim=8, dtype="float32", window=20)
Arena = npt.NDArray[np.uint64]


def groups(*sizes: int, split: bool = False) -> tuple[KVCacheGroup, ...]:
    """A model of six layers; blocks of full attention and of the window; `split` otherwise."""
    full, window = sizes
    if not split:
        return (
            KVCacheGroup(STATE, (0, 2)),
            KVCacheGroup(FULL, (1, 3, 4), full),
            KVCacheGroup(WINDOW, (5,), window),
        )
    return (
        KVCacheGroup(WINDOW, (5,), window),
        KVCacheGroup(FULL, (4,), full),
        KVCacheGroup(STATE, (2,)),
        KVCacheGroup(FULL, (3, 1), full),
        KVCacheGroup(STATE, (0,)),
    )


def plan_of(kept: tuple[KVCacheGroup, ...]) -> ArenaPlan:
    return plan_arena(kept, 16, 4 << 20, hash_block_size=4)


def tables_of(plan: ArenaPlan, num_tokens: int, rng: Random) -> list[list[int]]:
    """Blocks anywhere in the arena, each unit of one group."""
    units = list(range(plan.num_units))
    rng.shuffle(units)
    tables = []
    for group, per_unit in enumerate(plan.blocks_per_unit):
        slots: list[int] = []
        count = plan.blocks_for(group, num_tokens)
        while len(slots) < count:
            unit = units.pop()
            slots += range(unit * per_unit, (unit + 1) * per_unit)
        tables.append(slots[:count])
    return tables


def words_of(
    plan: ArenaPlan, tables: list[list[int]], num_tokens: int, first: int = 0
) -> Iterator[tuple[int, tuple[object, ...]]]:
    """(offset of a float in the arena, what it is) for all that these tokens need."""
    for number, group in enumerate(plan.groups):
        spec, blocks = group.spec, tables[number]
        for place, layer in enumerate(group.layers):
            if isinstance(spec, MambaSpec):
                start = plan.block_offset(number, blocks[0]) + place * spec.layer_bytes
                for offset in range(0, spec.layer_bytes, 4):
                    yield start + offset, ("state", layer, offset)
                continue
            yield from _pages(plan, number, blocks, (place, layer), range(first, num_tokens))


def _pages(
    plan: ArenaPlan, number: int, blocks: list[int], at: tuple[int, int], tokens: range
) -> Iterator[tuple[int, tuple[object, ...]]]:
    spec, size, (place, layer) = plan.groups[number].spec, plan.block_size_of(number), at
    assert isinstance(spec, AttentionSpec)
    needed = spec.first_needed(tokens.stop) if isinstance(spec, SlidingWindowSpec) else 0
    for token in range(max(tokens.start, needed), tokens.stop):
        page = plan.block_offset(number, blocks[token // size]) + place * spec.page_bytes(size)
        for head in range(2 * spec.num_kv_heads):
            row = page + (head * size + token % size) * spec.head_dim * 4
            for channel in range(spec.head_dim):
                yield row + 4 * channel, ("kv", layer, token, head, channel)


def announced(plan: ArenaPlan, tables: list[list[int]], num_tokens: int) -> SequenceBlocks:
    """Blocks that P announces: none that the sliding window has passed."""
    block_ids = []
    for number, blocks in enumerate(tables):
        spec, size = plan.groups[number].spec, plan.block_size_of(number)
        skipped = (
            spec.first_needed(num_tokens) // size if isinstance(spec, SlidingWindowSpec) else 0
        )
        block_ids.append(blocks[skipped:])
    return blocks_announced(plan, geometry_of(plan), block_ids, num_tokens=num_tokens)


def copy(spans: tuple[SpanPair, ...], source: Arena, target: Arena) -> None:
    for remote, local, length in spans:
        assert not (remote % 4 or local % 4 or length % 4)
        target[local // 4 : (local + length) // 4] = source[remote // 4 : (remote + length) // 4]


def missing(plan: ArenaPlan, num_tokens: int, num_local: int) -> list[tuple[int, int]]:
    """Attention after what is here, and every state."""
    states = [isinstance(group.spec, MambaSpec) for group in plan.groups]
    return [(0 if state else num_local, num_tokens) for state in states]


def pull(p: ArenaPlan, d: ArenaPlan, num_tokens: int, num_local: int, seed: int) -> PullPlan:
    """Plans, copies and compares every float that D has to get."""
    rng = Random(seed)
    there, here = tables_of(p, num_tokens, rng), tables_of(d, num_tokens, rng)
    names = {what: number for number, (_, what) in enumerate(words_of(p, there, num_tokens), 1)}
    source, target = (np.zeros(plan.arena_bytes // 4, np.uint64) for plan in (p, d))
    for offset, what in words_of(p, there, num_tokens):
        source[offset // 4] = names[what]
    remote = announced(p, there, num_tokens)
    ranges = missing(d, num_tokens, num_local)
    plan = plan_pull(d, remote, here, num_tokens=num_tokens, ranges=ranges)
    copy(plan.spans, source, target)
    wrong = [
        what
        for offset, what in words_of(d, here, num_tokens, num_local)
        if target[offset // 4] != names[what]
    ]
    assert not wrong, wrong[:5]
    compare_blocks(plan, remote, source, target)
    return plan


def compare_blocks(plan: PullPlan, remote: SequenceBlocks, source: Arena, target: Arena) -> None:
    """P hashes its bytes of a range in the order in which D hashes what it read."""
    for group in plan.groups:
        theirs = [
            b"".join(cut(source, *at) for at in pieces) for pieces in remote.blocks(group.asked)
        ]
        ours = [b"".join(cut(target, *piece[1:]) for piece in block) for block in group.blocks]
        assert theirs == ours
    is_whole = all(
        len(block) == 1 and block[0][::2] in whole_blocks(remote) for block in plan.blocks
    )
    assert (plan.numbers_at_p() is not None) == is_whole
    for number, block in zip(plan.numbers_at_p() or (), plan.blocks, strict=False):
        assert whole_blocks(remote)[number] == block[0][::2]


def whole_blocks(remote: SequenceBlocks) -> list[tuple[int, int]]:
    """Offset and length of all that P holds; states last."""
    of_kind = {
        is_state: [
            (offset, group.block_bytes)
            for group in remote.groups
            if group.is_state == is_state
            for offset in group.offsets
        ]
        for is_state in (False, True)
    }
    return of_kind[False] + of_kind[True]


def cut(arena: Arena, offset: int, length: int) -> bytes:
    return arena[offset // 4 : (offset + length) // 4].tobytes()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 64, 75])
@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (groups(16, 16), groups(16, 16)),
        (groups(16, 16), groups(32, 16)),
        (groups(48, 32), groups(16, 16)),
        (groups(16, 8), groups(24, 12)),
        (groups(16, 16), groups(16, 16, split=True)),
        (groups(32, 16, split=True), groups(16, 32)),
    ],
    ids=["alike", "twice", "thrice", "crossing", "split", "all"],
)
def test_every_byte_comes_to_its_place(
    theirs: tuple[KVCacheGroup, ...],
    ours: tuple[KVCacheGroup, ...],
    num_tokens: int,
    seed: int,
) -> None:
    p, d = plan_of(theirs), plan_of(ours)
    for num_local in (0, num_tokens // d.joint_block_size * d.joint_block_size):
        found = pull(p, d, num_tokens, num_local, seed)
        assert theirs != ours or found.numbers_at_p() is not None


def num_pieces(plan: PullPlan) -> int:
    """Before neighbours were joined."""
    return sum(map(len, plan.blocks))


def test_neighbours_on_both_sides_become_one_span_and_local_blocks_stay() -> None:
    plan = plan_of(groups(16, 16)[:2])
    block, state = plan.block_bytes(1), plan.block_bytes(0)
    there = [[5], [0, 7, 8, 3]]
    remote = blocks_announced(plan, geometry_of(plan), there, num_tokens=64)
    found = plan_pull(plan, remote, [[3], [0, 1, 2, 3]], num_tokens=64, ranges=[(16, 64)] * 2)
    assert set(found.spans) == {
        SpanPair(plan.block_offset(0, 5), plan.block_offset(0, 3), state),
        SpanPair(plan.block_offset(1, 7), plan.block_offset(1, 1), 2 * block),
        SpanPair(plan.block_offset(1, 3), plan.block_offset(1, 3), block),
    }
    assert (found.attention_bytes, found.state_bytes) == (3 * block, state)
    assert (num_pieces(found), len(found.spans)) == (4, 3)


def test_a_prompt_that_ends_within_a_block_still_moves_whole_blocks() -> None:
    """1,700 tokens of a hybrid, allocated in one go on both sides: its state and one span."""
    plan = plan_of(groups(16, 16)[:2])
    blocks = list(range(plan.blocks_for(1, 1_700)))
    remote = blocks_announced(plan, geometry_of(plan), [[0], blocks], num_tokens=1_700)
    found = plan_pull(plan, remote, [[0], blocks], num_tokens=1_700, ranges=[(0, 1_700)] * 2)
    assert num_pieces(found) == 1 + len(blocks)
    assert len(found.spans) <= 4
    assert found.attention_bytes == len(blocks) * plan.block_bytes(1)


def test_a_group_that_is_split_alike_on_both_sides_moves_whole_blocks() -> None:
    """Other groups elsewhere do not make it slower."""
    p, d = plan_of(groups(16, 16)), plan_of(groups(16, 32))
    alike = pull(p, d, 64, 0, 0)
    assert num_pieces(alike) < 1 + 4 + 2 * 64


@pytest.mark.parametrize(
    "block_ids",
    [[(0,), (0,)], [(0,), (0, 1, 2)], [(), (0, 1)], [(0,)], [(0,), (0, 1), (0,)], []],
)
def test_other_blocks_or_groups_than_needed_are_refused(block_ids: list[tuple[int, ...]]) -> None:
    plan = plan_of(groups(16, 16)[:2])
    with pytest.raises(TransportError, match="announced"):
        blocks_announced(plan, geometry_of(plan), block_ids, num_tokens=32)


def test_what_no_layer_here_keeps_is_refused() -> None:
    plan = plan_of(groups(16, 16)[:2])
    foreign = msgspec.structs.replace(geometry_of(plan)[1], spec="attention of another kind")
    with pytest.raises(TransportError, match="another kind"):
        blocks_announced(plan, [foreign], [(0, 1)], num_tokens=32)
    remote = SequenceBlocks(blocks_here(plan, [[3], [0, 1]]).groups[:1])
    with pytest.raises(TransportError, match="layer 1 keeps no"):
        plan_pull(plan, remote, [[3], [0, 1]], num_tokens=32, ranges=[(0, 32)] * 2)


@example([3], [5])
@given(st.lists(st.integers(1, 9), max_size=8), st.lists(st.integers(1, 9), max_size=8))
def test_pairs_are_cut_where_either_side_is(theirs: list[int], ours: list[int]) -> None:
    """Every byte of the shorter side has its partner."""
    there = [Piece(100 * number, length) for number, length in enumerate(theirs)]
    here = [Piece(1000 + 10 * number, length) for number, length in enumerate(ours)]
    bytes_there = [at + i for at, length in there for i in range(length)]
    bytes_here = [at + i for at, length in here for i in range(length)]
    copied = [
        (remote + i, local + i)
        for remote, local, length in pair_up(there, here)
        for i in range(length)
    ]
    assert copied == list(zip(bytes_there, bytes_here, strict=False))
