"""Triton's attention over pages, in its interpreter and float32, against `naive.py`.

Whatever no token may read is NaN: pages of no sequence, the rest of a last page, what lies between
pages, and blocks before a window.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
import torch
from torch import Tensor

from engine.forward import AttentionCache, AttentionIndex, SequenceLens
from engine.ops.backend import cuda_ops
from engine.ops.paged_attention import cuda, naive
from engine.ops.paged_attention.cuda import MAX_SPLITS, MIN_SPLIT, channel_tiles
from serving import memory_plan
from tests.tiers import everyday, l_shape

ATTEND = cuda_ops().paged_attention
SCALE = 0.3
# A row of padding computes with NaN.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")


@dataclass(slots=True, frozen=True)
class Shape:
    """Of one layer; a `latent` layer's V is its K."""

    heads: int = 4
    kv_heads: int = 2
    dim: int = 8
    block_size: int = 16
    window: int | None = None
    latent: bool = False


SHAPES = {
    "usual": Shape(),
    "as many heads": Shape(3, 3, 7, 3),
    "many queries a head": Shape(18, 1, 24, 16),
    "two tiles of channels": Shape(6, 2, 45, 1),
    "window": Shape(window=40),
    "window of one": Shape(3, 1, 9, 3, window=1),
    "window over splits": Shape(window=300),
    "latent": Shape(20, 1, 45, 16, latent=True),
}
DECODES = {
    "short": [1, 16, 17],
    "around a split": [MIN_SPLIT - 1, MIN_SPLIT, MIN_SPLIT + 1],
    "uneven": [700, 1, 33],
    "more splits than are joined at once": [8 * MIN_SPLIT + 5],
}


class Batch:
    """New positions `spans` of sequences, of which `decodes` have one; then `padding` rows.

    K and V pages take turns in `memory` [1 + rows, 2, kv_heads, block_size, dim]. Its first row is
    for what a broken kernel writes to a slot of -1.
    """

    def __init__(self, shape: Shape, spans: Sequence[range], *, padding: int = 0) -> None:
        self.shape, self.spans, self.padding = shape, spans, padding
        self._draw = torch.Generator().manual_seed(len(spans))
        counts = [-(-span.stop // shape.block_size) for span in spans]
        rows = sum(counts) + 2
        page = (shape.kv_heads, shape.block_size, shape.dim)
        self.memory = torch.full((1 + rows, 2, *page), float("nan"))
        *order, poison = torch.randperm(rows, generator=self._draw).tolist()
        # Entries without meaning name a page of NaN.
        self.tables = torch.full((len(spans) + padding, max(counts)), poison)
        for number, (span, count) in enumerate(zip(spans, counts, strict=True)):
            first = 0 if shape.window is None else max(0, span.start + 1 - shape.window)
            needed = range(first // shape.block_size, count)
            self.tables[number, needed.start : count] = torch.tensor([order.pop() for _ in needed])
            places = self.slots(number, range(first, span.start))
            for part in self._tokens(self.memory):
                part[places] = self._numbers(len(places), shape.dim)
        tokens = sum(map(len, spans)) + padding
        # Rows and heads of q, k and v lie apart, as of a product that gives more.
        self.q = self._numbers(tokens, shape.heads + 2, shape.dim + 3)[:, 1:-1, : shape.dim]
        self.new = [
            self._numbers(tokens, shape.kv_heads + 1, shape.dim + 1)[:, 1:, :-1] for _ in range(2)
        ]

    def slots(self, number: int, positions: range) -> Tensor:
        """Where they lie among the tokens of K, heads fastest."""
        shape = self.shape
        slots = [
            (int(self.tables[number, at // shape.block_size]) * 2 * shape.kv_heads + head)
            * shape.block_size
            + at % shape.block_size
            for at in positions
            for head in range(shape.kv_heads)
        ]
        return torch.tensor(slots, dtype=torch.int64)

    def run(self) -> Tensor:
        """[tokens, heads, dim] of the operator, which writes K and V first."""
        spans = [*self.spans, *[range(1)] * self.padding]
        lens = [len(span) for span in spans]
        written = [self.slots(number, span) for number, span in enumerate(self.spans)]
        skipped = torch.full((self.padding * self.shape.kv_heads,), -1)
        index = AttentionIndex(
            self.tables,
            torch.cat([*written, skipped]),
            torch.tensor([position for span in spans for position in span]),
            SequenceLens(lens.count(1), lens, [span.start for span in spans]),
        )
        k, v = self.new
        y = ATTEND(
            self.q,
            k,
            None if self.shape.latent else v,
            self._cache(self.memory),
            index,
            scale=SCALE,
            window=self.shape.window,
        )
        return y.view(self.q.shape)

    def truth(self) -> tuple[Tensor, Tensor]:
        """Results of the rows before the padding, and memory as `run` must leave it."""
        memory, results, start = self.memory.clone(), [], 0
        cache, (k, v) = self._cache(memory), self.new
        for number, span in enumerate(self.spans):
            own = slice(start, start + len(span))
            values = None if self.shape.latent else v[own]
            naive.write_tokens(k[own], values, cache, self.slots(number, span))
            results.append(
                naive.prefill(
                    self.q[own],
                    cache,
                    self.tables[number],
                    context=span.start,
                    scale=SCALE,
                    window=self.shape.window,
                )
            )
            start = own.stop
        return torch.cat(results), memory

    def _numbers(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._draw)

    def _tokens(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        tokens = memory[1:].view(-1, self.shape.dim)
        page = 0 if self.shape.latent else self.shape.kv_heads * self.shape.block_size
        return tokens, tokens[page:]

    def _cache(self, memory: Tensor) -> AttentionCache:
        k, v = memory[1:].unbind(1)
        return AttentionCache(k, k if self.shape.latent else v, *self._tokens(memory))


def assert_right(batch: Batch) -> Tensor:
    """Returns what the operator returned."""
    wanted, memory = batch.truth()
    got = batch.run()
    torch.testing.assert_close(got[: len(wanted)], wanted, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(batch.memory, memory, rtol=0.0, atol=0.0, equal_nan=True)
    return got


def decodes(lens: Sequence[int]) -> list[range]:
    return [range(length - 1, length) for length in lens]


@pytest.mark.parametrize(("shape", "lens"), l_shape(SHAPES, DECODES, corner=("usual", "short")))
def test_decodes_are_what_is_written_out(shape: str, lens: str) -> None:
    assert_right(Batch(SHAPES[shape], decodes(DECODES[lens])))


@pytest.mark.parametrize("shape", everyday(SHAPES, ["window over splits"]))
def test_rows_of_padding_write_nothing(shape: str) -> None:
    """They are given, and read, a page of NaN."""
    batch = Batch(SHAPES[shape], decodes([290, 3]), padding=3)
    got = assert_right(batch)
    alone = replace_rows(batch, [0, 1]).run()
    assert torch.equal(got[:2], alone)


def replace_rows(batch: Batch, chosen: list[int], *, wider: int = 0) -> Batch:
    """The decodes `chosen` of `batch` as a batch of their own, over its memory."""
    own = Batch(batch.shape, [batch.spans[i] for i in chosen])
    own.memory = batch.memory.clone()
    own.tables = torch.cat([batch.tables[chosen], batch.tables[chosen, :1].repeat(1, wider)], 1)
    own.q, own.new = batch.q[chosen], [new[chosen] for new in batch.new]
    return own


@pytest.mark.parametrize("shape", everyday(SHAPES, ["window"]))
def test_a_decode_depends_on_its_sequence_only(shape: str) -> None:
    """Bit by bit: not on the batch around it, nor on the width of the table."""
    batch = Batch(SHAPES[shape], decodes([MIN_SPLIT + 70, 5]))
    together = batch.run()
    for row in range(2):
        wider = 2000 // batch.shape.block_size
        assert torch.equal(replace_rows(batch, [row]).run()[0], together[row])
        assert torch.equal(replace_rows(batch, [row], wider=wider).run()[0], together[row])


@pytest.mark.parametrize("shape", everyday(SHAPES, ["usual", "window", "latent"]))
def test_a_mixed_batch_is_what_is_written_out(shape: str) -> None:
    spans = [*decodes([33]), range(5), range(20, 50), range(7, 9)]
    assert_right(Batch(SHAPES[shape], spans))


@pytest.mark.parametrize("window", everyday([1, 8, 17, 70], [1, 17]))
@pytest.mark.parametrize("context", everyday([0, 1, 100], [0, 100]))
def test_segments_longer_than_a_window(
    context: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In tiles, whose last is of any length."""
    monkeypatch.setattr(cuda, "MIN_TILE", 8)
    spans = [range(context, context + tokens) for tokens in (9, 60)]
    assert_right(Batch(Shape(2, 1, window=window), spans))


@pytest.mark.parametrize("seed", everyday(range(40), range(2)))
def test_batches_of_all_kinds(seed: int) -> None:
    draw = Random(seed)
    kv_heads = draw.randint(1, 3)
    latent = draw.random() < 0.25
    shape = Shape(
        kv_heads * draw.randint(1, 6),
        kv_heads,
        draw.randint(1, 50),
        draw.choice([1, 3, 16, 32]),
        None if latent else draw.choice([None, draw.randint(1, 400)]),
        latent,
    )
    spans = decodes([draw.choice([draw.randint(1, 40), draw.randint(200, 600)]) for _ in range(3)])
    for _ in range(draw.randint(0, 2)):
        context = draw.randint(0, 60)
        spans.append(range(context, context + draw.randint(2, 40)))
    assert_right(Batch(shape, spans))


@pytest.mark.long
def test_splits_grow_with_a_sequence() -> None:
    assert_right(Batch(Shape(2, 1), decodes([MIN_SPLIT * MAX_SPLITS + 3, 9])))


def test_what_is_broken_shows() -> None:
    batch = Batch(Shape(), [*decodes([300, 20]), range(3, 20)])
    batch.memory[1:].view(-1, 8)[batch.slots(0, range(270, 271))[:1], 3] = float("nan")
    got = batch.run()
    # The first kv head has the first two query heads.
    assert got[0, :2].isnan().all()
    assert not got[0, 2:].isnan().any()
    assert not got[1:].isnan().any()


def test_a_plan_of_memory_counts_with_the_same_splits() -> None:
    assert (memory_plan.MIN_SPLIT, memory_plan.MAX_SPLITS) == (MIN_SPLIT, MAX_SPLITS)


@pytest.mark.parametrize(
    ("dim", "tiles"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (24, (32, 0)),
        (33, (32, 16)),
        (45, (32, 16)),
        (64, (64, 0)),
        (80, (64, 16)),
        (112, (128, 0)),
        (576, (512, 64)),
    ],
)
def test_channels_are_cut_into_powers_of_two(dim: int, tiles: tuple[int, int]) -> None:
    assert channel_tiles(dim) == tiles
