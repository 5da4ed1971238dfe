"""Which bytes of P's arena go where in D's: a pure function from two sequences to spans.

Where P and D cut and group alike, a block is one piece; else a piece is what lies together on both
sides, down to some tokens of one head. Neighbours on both sides become one span.

    P  |b7|b8|b9|..|b3|        D  |b0|b1|b2|b3|
        \\_______/    |             \\_______/  |
         one span   one span
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from connector.pd.layout import GroupBlocks, Piece, SequenceBlocks, blocks_here
from connector.pd.wire.messages import BlockRange
from connector.transports.base import SpanPair
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import SlidingWindowSpec

Block = tuple[SpanPair, ...]
"""One block or state of D, in pieces, in the common order of `layout`."""


@dataclass(slots=True, frozen=True)
class GroupPull:
    """The pull of one of D's groups: the range that P can be asked for, and its blocks in order."""

    asked: BlockRange
    blocks: tuple[Block, ...]
    is_state: bool


@dataclass(slots=True, frozen=True)
class PullPlan:
    """All bytes of one pull from `remote`, which is all that P holds of the sequence.

    `blocks`: of all groups, in their order. `spans`: the same bytes, neighbours joined.
    `filled_from`: by D's groups, the first token that is filled in; 0 if it begins a block.
    """

    groups: tuple[GroupPull, ...]
    blocks: tuple[Block, ...]
    spans: tuple[SpanPair, ...]
    attention_bytes: int
    state_bytes: int
    remote: SequenceBlocks
    filled_from: tuple[int, ...]

    def numbers_at_p(self) -> list[int] | None:
        """The number of each block among P's; None if a block is not exactly one of P's."""
        numbers = {block: number for number, block in enumerate(self.remote.whole_blocks())}
        whole = [(block[0].remote, block[0].length) for block in self.blocks if len(block) == 1]
        found = [numbers[block] for block in whole if block in numbers]
        return found if len(found) == len(self.blocks) else None


def plan_pull(
    plan: ArenaPlan,
    remote: SequenceBlocks,
    local_tables: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    ranges: Sequence[tuple[int, int]],
) -> PullPlan:
    """Spans that fill `ranges[g]` of group g in `local_tables`, for a start after `num_tokens`.

    An empty range fills nothing; any other of a Mamba group stands for its state. Raises
    TransportError when P lacks something that a layer here keeps (`check_geometry`).
    """
    local = blocks_here(plan, local_tables)
    groups, filled_from = [], [0] * len(local.groups)
    for number, (group, tokens) in enumerate(zip(local.groups, ranges, strict=True)):
        if tokens[0] >= tokens[1]:
            continue
        asked = _range(group, remote, tokens, num_tokens=num_tokens)
        if asked.start % group.block_size:  # P no longer has what comes before
            filled_from[number] = asked.start
        pairs = zip(remote.blocks(asked), local.blocks(asked), strict=True)
        blocks = tuple(pair_up(there, here) for there, here in pairs)
        groups.append(GroupPull(asked, blocks, group.is_state))
    blocks = tuple(block for group in groups for block in group.blocks)
    spans = tuple(coalesce(chain.from_iterable(blocks)))
    states = sum(it.length for group in groups if group.is_state for it in chain(*group.blocks))
    attention = sum(span.length for span in spans) - states
    return PullPlan(tuple(groups), blocks, spans, attention, states, remote, tuple(filled_from))


def pair_up(remote: Sequence[Piece], local: Sequence[Piece]) -> Block:
    """The same bytes, cut where either side is cut; mostly neither is."""
    if len(remote) == len(local) == 1 and remote[0].length == local[0].length:
        return (SpanPair(remote[0].offset, *local[0]),)
    pairs, there, here = [], list(reversed(remote)), list(reversed(local))
    while there and here:
        source, target = there.pop(), here.pop()
        length = min(source.length, target.length)
        pairs.append(SpanPair(source.offset, target.offset, length))
        there += _rest(source, length)
        here += _rest(target, length)
    return tuple(pairs)


def coalesce(pieces: Iterable[SpanPair]) -> list[SpanPair]:
    """The same copies in as few spans as possible: pieces adjacent on both sides are joined."""
    spans: list[SpanPair] = []
    remote = local = length = 0
    for piece in pieces:
        if piece.remote == remote + length and piece.local == local + length:
            length += piece.length
            continue
        if length:
            spans.append(SpanPair(remote, local, length))
        remote, local, length = piece
    if length:
        spans.append(SpanPair(remote, local, length))
    return spans


def _range(
    group: GroupBlocks, remote: SequenceBlocks, tokens: tuple[int, int], *, num_tokens: int
) -> BlockRange:
    """Whole blocks of D around `tokens`, as far as P's blocks reach.

        tokens  0    16    32    48    64        asked for 20 to 50, D's blocks of 16
        D       |     |==^==|=====|=^===|        16 to 64: whole blocks move where both cut alike
        P       |       |=======|=======|        P's blocks of 24 end at 72, so 64 it is

    A sliding window needs nothing before its first token.
    """
    name = BlockRange(kept=group.kept, layers=group.layers, block_size=group.block_size)
    if group.is_state:
        return name
    spec, size = group.spec, group.block_size
    needed = spec.first_needed(num_tokens) if isinstance(spec, SlidingWindowSpec) else 0
    first = max(needed, tokens[0]) // size * size
    owners = remote.owners(name)
    return BlockRange(
        kept=group.kept,
        layers=group.layers,
        block_size=size,
        start=max(first, *(owner.start for owner in owners)),
        end=min(-(-tokens[1] // size) * size, *(owner.end for owner in owners)),
    )


def _rest(piece: Piece, used: int) -> tuple[Piece, ...]:
    return (Piece(piece.offset + used, piece.length - used),) if used < piece.length else ()
