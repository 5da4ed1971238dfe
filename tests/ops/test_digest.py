"""Digests of a device's kernel, in Triton's interpreter, against the xxhash package's."""

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.arena import ArenaMemory
from engine.digests import PIECE_BYTES, Spans, digest
from engine.ops.copy_spans.cuda import copy_spans
from engine.ops.copy_spans.tables import in_parts
from engine.ops.digest import cuda
from engine.ops.digest.cuda import block_digests
from tests.support.nodes.device_arena import DeviceArena

KIB = 1 << 10
# Around a stripe of 64 bytes, a block of 1,024, and where xxh3 begins to be this function.
LENGTHS = [1, 8, 240, 241, 242, 255, 256, 257, 320, 1023, 1024, 1025, 1088, 1089, 2047, 2048, 2049]
DATA = torch.randint(0, 256, (400 * KIB,), dtype=torch.uint8)


def read(offset: int, length: int) -> memoryview:
    return DATA.numpy().data[offset : offset + length]


def check(blocks: Sequence[Spans]) -> None:
    assert block_digests(DATA, blocks, read) == [digest(read, block) for block in blocks]


def test_digests_are_xxhash_s_own() -> None:
    check([[(8 * number, length)] for number, length in enumerate(LENGTHS)])


def test_no_block_has_no_digest() -> None:
    assert block_digests(DATA, [], read) == []


def test_a_block_may_begin_between_words_and_lie_in_several_spans() -> None:
    check([[(number, 300)] for number in range(1, 8)])
    check([[(1000, 100), (5, 141)], [(0, 240), (7, 0), (300, 1)], [(16, 100), (8, 100)]])


def test_a_block_of_several_pieces() -> None:
    check([[(8, 512)], [(16, 2 * PIECE_BYTES + 24)], [(3, 10)]])


def test_blocks_in_many_spans_are_brought_together_a_few_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "GATHERED_BYTES", 1000)
    check([[(at, 200), (2 * at, 199 + at)] for at in range(1, 10)])


@pytest.mark.long
@pytest.mark.parametrize("length", [48 * KIB, 64 * KIB, 100 * KIB, 128 * KIB, 200 * KIB - 3])
def test_long_blocks(length: int) -> None:
    check([[(0, length)], [(5, length)], [(200 * KIB, length // 3), (0, length - length // 3)]])


@settings(max_examples=6)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 999), st.integers(1, 400)), min_size=1, max_size=4),
        max_size=4,
    )
)
def test_blocks_of_any_spans(blocks: list[list[tuple[int, int]]]) -> None:
    check(blocks)


def test_one_byte_more_or_less_is_seen() -> None:
    (before,) = block_digests(DATA, [[(0, 1500)]], read)
    for place in (0, 1023, 1024, 1400, 1499):
        changed = DATA.clone()
        changed[place] ^= 1
        assert block_digests(changed, [[(0, 1500)]], read) != [before]


@pytest.mark.parametrize("width", [8, 4, 2, 1])
def test_spans_are_copied_and_nothing_else(width: int) -> None:
    """More than a program copies at once, of words of each width."""
    rng = random.Random(width)
    lengths = [width * length for length in (1, 5, 4096, 4097, 9000)]
    starts = [width * number for number in sorted(rng.sample(range(20000), 5))]
    tos = np.cumsum([width, *(length + width for length in lengths)])[:-1]
    target = torch.zeros(int(tos[-1]) + lengths[-1] + 16, dtype=torch.uint8)
    expected = target.clone()
    for start, to, length in zip(starts, tos.tolist(), lengths, strict=True):
        expected[to : to + length] = DATA[start : start + length]
    copy_spans(DATA, target, np.array([starts, tos, lengths], np.int64).T)
    assert torch.equal(target, expected)


@given(st.lists(st.integers(1, 50), min_size=1), st.integers(1, 9), st.booleans())
def test_parts_are_all_of_every_range(lengths: list[int], size: int, joins_rest: bool) -> None:
    parts = in_parts(np.array(lengths), size, joins_rest=joins_rest)
    places = [
        (of, at)
        for of, start, length in zip(*(it.tolist() for it in parts), strict=True)
        for at in range(start, start + length)
    ]
    assert places == [(of, at) for of, length in enumerate(lengths) for at in range(length)]
    assert max(parts.length) < (2 * size if joins_rest else size + 1) or max(lengths) < size


def test_a_device_s_arena_hashes_its_bytes_there() -> None:
    """Neither view nor copy is made for the host, but of tiny blocks."""
    device, host = DeviceArena(16 * KIB), ArenaMemory(16 * KIB)
    content = random.Random(1).randbytes(16 * KIB)
    for arena in (device, host):
        with arena.writable(0, len(content)) as target:
            target[:] = content
    blocks = [[(0, 3000)], [(64, 500), (2048, 500)], [(9, 100)]]
    assert ArenaMemory.digests(device, blocks) == host.digests(blocks)
    device.close()
    host.close()
