"""Spans of bytes from one tensor of a device into another, in one launch."""

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops.copy_spans.tables import in_parts, on_device

CHUNK = 4096
"""Words that one program copies: 32 KiB of the widest."""
WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


def copy_spans(source: Tensor, target: Tensor, spans: npt.NDArray[np.int64]) -> None:
    """Queues, on the current stream, a copy of each row of `spans` [N, 3].

    A row is the byte offset in `source` uint8 [S], the one in `target` uint8 [T], and the length.
    Both tensors begin at an address that 8 divides. Spans of the target do not overlap.
    """
    if not len(spans):
        return
    # The widest word that divides every offset and length; K/V and states allow all of 8 bytes.
    width = int(np.gcd(np.gcd.reduce(spans, axis=None), max(WORDS)))
    froms, tos, lengths = (spans // width).T
    part = in_parts(lengths, CHUNK, joins_rest=False)
    table = (froms[part.of] + part.start, tos[part.of] + part.start, part.length)
    words = [_in_words(tensor, width) for tensor in (source, target)]
    count = len(part.of)
    _copy[(count,)](*words, on_device(table, target.device), count, CHUNK=CHUNK, num_warps=8)


def _in_words(content: Tensor, width: int) -> Tensor:
    return content[: len(content) // width * width].view(WORDS[width])


@triton.jit(do_not_specialize=["count"])
def _copy(source, target, table, count, CHUNK: tl.constexpr):
    """One part: its words in the source, in the target, and their number, from `table` [3, N]."""
    part = tl.program_id(0)
    start, to = tl.load(table + part), tl.load(table + count + part)
    at = tl.arange(0, CHUNK)
    is_here = at < tl.load(table + 2 * count + part)
    tl.store(target + to + at, tl.load(source + start + at, mask=is_here), mask=is_here)
