"""Digests of blocks in a device's memory: xxh3-64 of their pieces as one kernel.

From the specification of XXH3 (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), for inputs of more
than 240 bytes. Eight 64-bit sums, the lanes, run over stripes of 64 bytes:

    input    | stripe 0 | 1 | ... | 15 | 16 | ... | 31 | ... |  rest  |      length bytes
             |--------- block ---------|--- block -----|     |--------|
                                     mix             mix    | last stripe |  its last 64 bytes

Within a block of 16 stripes a lane is a plain sum, so a warp adds them up at once; only the mixing
between blocks is a chain. Pieces know nothing of each other: each is a program of one warp.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from xxhash import xxh3_64_intdigest

from engine.digests import PIECE_BYTES, ReadBytes, Spans, digest
from engine.ops.copy_spans.cuda import copy_spans
from engine.ops.copy_spans.tables import Numbers, in_parts, on_device

MOST_TINY = 240
"""Bytes of an input up to which xxh3 is another function."""
WORD = 8
GATHERED_BYTES = 256 << 20
"""Most bytes of blocks in several spans that are brought together at once."""

# The specification's default secret.
SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671f"
    "cb79e64eccc0e578825ad07dccff7221b8084674f743248ee03590e6813a264c"
    "3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364"
    "eac5ac8334d3ebc3c581a0fffa1363eb170ddd51b7f0da49d316552629d4689e"
    "2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
PRIME32_1, PRIME32_2, PRIME32_3 = 0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D
PRIME64_1, PRIME64_2, PRIME64_3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
PRIME64_4, PRIME64_5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
SUMS = (PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3, PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1)
LAST, MERGE = 192 - 64 - 7, 11
"""Bytes of the secret from which the last stripe and the merged lanes take their keys."""
# Rows of the kernel's constants, in words: | secret, 24 | keys of LAST, 8 | of MERGE, 8 | SUMS, 8 |
AT_LAST, AT_MERGE, AT_SUMS = (tl.constexpr(place) for place in (24, 32, 40))
AT_MIX = tl.constexpr(16)
PRIME_1, PRIME_LENGTH = tl.constexpr(PRIME32_1), tl.constexpr(PRIME64_1)
PRIME_END = tl.constexpr(0x165667919E3779F9)


def block_digests(data: Tensor, blocks: Sequence[Spans], read: ReadBytes) -> list[int]:
    """The digest of each block by the rule of `engine.digests`, of a device's bytes [N] uint8.

    A block has at least one span of (offset, length); one copy of 8 bytes for each piece comes
    back. Tiny blocks are hashed here, by `read`. Runs on the current stream, and waits for it.
    """
    counts = np.fromiter(map(len, blocks), np.int64, len(blocks))
    # Thousands of blocks of a pull: a list of all tuples would take longer than the kernel.
    numbers = chain.from_iterable(chain.from_iterable(blocks))
    spans = np.fromiter(numbers, np.int64, 2 * int(counts.sum())).reshape(-1, 2)
    first = np.cumsum(counts) - counts
    nbytes = np.add.reduceat(spans[:, 1], first) if len(blocks) else counts
    is_tiny = nbytes <= MOST_TINY
    # Words are read where they lie; so a block in several spans, or between words, moves first.
    is_scattered = ((counts > 1) | (spans[first, 0] % WORD > 0)) & ~is_tiny
    whole = np.flatnonzero(~is_scattered & ~is_tiny)
    found = [(whole, _hash(data, spans[first[whole], 0], nbytes[whole]))]
    for batch in _batches(np.flatnonzero(is_scattered), nbytes):
        found.append((batch, _hash_scattered(data, [blocks[it] for it in batch], nbytes[batch])))
    order = np.concatenate([numbers for numbers, _ in found])
    pieces = torch.cat([digests for _, digests in found]).cpu().numpy().view(np.uint64)
    digests = [0] * len(blocks)
    for number, found_there in zip(order.tolist(), _combined(pieces, nbytes[order]), strict=True):
        digests[number] = found_there
    for number in np.flatnonzero(is_tiny).tolist():
        digests[number] = digest(read, blocks[number])
    return digests


def _batches(numbers: Numbers, nbytes: Numbers) -> list[Numbers]:
    """Of these blocks as many at once as GATHERED_BYTES have room for, or one."""
    if not len(numbers):
        return []
    number_of = np.cumsum(nbytes[numbers]) // GATHERED_BYTES
    return np.split(numbers, np.flatnonzero(np.diff(number_of)) + 1)


def _hash_scattered(data: Tensor, blocks: Sequence[Spans], nbytes: Numbers) -> Tensor:
    """Digests of pieces of blocks that are first brought together in a buffer, each at a word."""
    room = -(-nbytes // WORD) * WORD
    places = np.cumsum(room) - room
    rows: list[tuple[int, int, int]] = []
    for place, block in zip(places.tolist(), blocks, strict=True):
        for offset, length in block:
            rows.append((offset, place, length))
            place += length
    buffer = torch.empty(int(room.sum()), dtype=torch.uint8, device=data.device)
    copy_spans(data, buffer, np.array(rows, np.int64))
    return _hash(buffer, places, nbytes)


def _hash(data: Tensor, starts: Numbers, nbytes: Numbers) -> Tensor:
    """xxh3-64 of each piece of ranges of `data`, int64 [pieces]; each start is at a word."""
    part = in_parts(nbytes, PIECE_BYTES, joins_rest=True)
    count = len(part.of)
    found = torch.empty(count, dtype=torch.int64, device=data.device)
    if count:
        table = on_device((starts[part.of] + part.start, part.length), data.device)
        words = data[: len(data) // WORD * WORD].view(torch.int64)
        _xxh3[(count,)](data, words, table, _constants(data.device), found, count, num_warps=1)
    return found


def _combined(pieces: "np.ndarray[Any, np.dtype[np.uint64]]", nbytes: Numbers) -> list[int]:
    counts = np.maximum(nbytes // PIECE_BYTES, 1)
    ends = np.cumsum(counts)
    digests: list[int] = pieces[ends - counts].tolist()
    several, content = np.flatnonzero(counts > 1), pieces.astype("<u8").tobytes()
    places = (WORD * (ends - counts)[several]).tolist(), (WORD * ends[several]).tolist()
    for number, start, end in zip(several.tolist(), *places, strict=True):
        digests[number] = xxh3_64_intdigest(content[start:end])
    return digests


@lru_cache
def _constants(device: torch.device) -> Tensor:
    """int64 [48], as the rows above say."""
    keys = b"".join(SECRET[at : at + size] for at, size in ((0, 192), (LAST, 64), (MERGE, 64)))
    words = np.concatenate([np.frombuffer(keys, "<u8"), np.array(SUMS, np.uint64)])
    return torch.from_numpy(words.view(np.int64)).to(device)


@triton.jit(do_not_specialize=["count"])
def _xxh3(data, words, table, constants, found, count):
    """One piece: start and length from `table` [2, N], its digest to `found` [N]."""
    piece = tl.program_id(0)
    start, length = tl.load(table + piece), tl.load(table + count + piece)
    # The eight lanes as two tiles of four: a lane also adds the word of the other of its pair.
    pair = 2 * tl.arange(0, 4)
    stripes = tl.arange(0, 16)[:, None]
    place = stripes + pair[None, :]
    keys, other_keys = _words(constants + place), _words(constants + place + 1)
    sums, other_sums = _words(constants + AT_SUMS + pair), _words(constants + AT_SUMS + pair + 1)
    mix, other_mix = _words(constants + AT_MIX + pair), _words(constants + AT_MIX + pair + 1)

    num_blocks = (length - 1) // 1024
    at = words + start // 8 + 8 * stripes + pair[None, :]
    for block in range(0, num_blocks):
        one, other = _words(at + block * 128), _words(at + block * 128 + 1)
        sums += tl.sum(_product(one ^ keys) + other, axis=0)
        other_sums += tl.sum(_product(other ^ other_keys) + one, axis=0)
        sums = (sums ^ (sums >> 47) ^ mix) * PRIME_1
        other_sums = (other_sums ^ (other_sums >> 47) ^ other_mix) * PRIME_1

    # The stripes after the last block, and once more the last 64 bytes, wherever they begin.
    is_whole = stripes < (length - 1 - num_blocks * 1024) // 64
    at += num_blocks * 128
    one, other = _words(at, is_whole), _words(at + 1, is_whole)
    sums += tl.sum(tl.where(is_whole, _product(one ^ keys) + other, 0), axis=0)
    other_sums += tl.sum(tl.where(is_whole, _product(other ^ other_keys) + one, 0), axis=0)
    end = data + start + length - 64
    one, other = _word_of_bytes(end + 8 * pair), _word_of_bytes(end + 8 * pair + 8)
    last = constants + AT_LAST + pair
    sums += _product(one ^ _words(last)) + other
    other_sums += _product(other ^ _words(last + 1)) + one

    merge = constants + AT_MERGE + pair
    one, other = sums ^ _words(merge), other_sums ^ _words(merge + 1)
    merged = length.to(tl.uint64) * PRIME_LENGTH
    merged += tl.sum((one * other) ^ tl.umulhi(one, other), axis=0)
    merged = (merged ^ (merged >> 37)) * PRIME_END
    tl.store(found + piece, (merged ^ (merged >> 32)).to(tl.int64, bitcast=True))


@triton.jit
def _words(at, mask=None):
    return tl.load(at, mask=mask).to(tl.uint64, bitcast=True)


@triton.jit
def _product(x):
    """Low half times high half."""
    return (x & 0xFFFFFFFF) * (x >> 32)


@triton.jit
def _word_of_bytes(at):
    """Little-endian words [4] from addresses [4] that may lie between words."""
    digits = tl.arange(0, 8)
    found = tl.load(at[:, None] + digits[None, :]).to(tl.uint64)
    return tl.sum(found << (8 * digits[None, :]).to(tl.uint64), axis=1)
