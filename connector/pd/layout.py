"""Blocks to byte spans: which bytes of P's arena go where in D's. Pure numbers.

A block holds all layers of its group, so it is one span; neighbours on both sides become one span.

    P  |b7|b8|b9|..|b3|        D  |b0|b1|b2|b3|
        \\_______/    |             \\_______/  |
         one span   one span
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from connector.transports.base import SpanPair
from engine.errors import TransportError
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec, SlidingWindowSpec


@dataclass(slots=True, frozen=True)
class PullPlan:
    """What one pull reads: as few spans as possible, and bytes by kind."""

    spans: tuple[SpanPair, ...]
    attention_bytes: int
    state_bytes: int


def plan_pull(
    plan: ArenaPlan,
    local_tables: Sequence[Sequence[int]],
    remote_offsets: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_local_tokens: int,
) -> PullPlan:
    """Spans that fill `local_tables` with `num_tokens` tokens, of which the first are here already.

    `remote_offsets[g]` are byte offsets of group g's last blocks in P's arena; blocks that a window
    has left behind are not announced and not read. Raises TransportError when P announces more
    blocks than D reserved, or too few.
    """
    if len(local_tables) != len(remote_offsets):
        raise TransportError(
            f"{len(remote_offsets)} KV cache groups announced, {len(local_tables)} reserved"
        )
    pieces: list[SpanPair] = []
    sizes = {True: 0, False: 0}
    for group, (blocks, offsets) in enumerate(zip(local_tables, remote_offsets, strict=True)):
        first = _first_block(plan, group, num_tokens, num_local_tokens=num_local_tokens)
        skipped = len(blocks) - len(offsets)
        if not 0 <= skipped <= first:
            raise TransportError(
                f"group {group}: {len(offsets)} blocks announced, {len(blocks)} reserved"
            )
        length = plan.block_bytes(group)
        sizes[isinstance(plan.groups[group].spec, MambaSpec)] += length * (len(blocks) - first)
        pieces += [
            SpanPair(remote=offset, local=plan.block_offset(group, block), length=length)
            for offset, block in zip(offsets[first - skipped :], blocks[first:], strict=True)
        ]
    return PullPlan(tuple(coalesce(pieces)), sizes[False], sizes[True])


def _first_block(plan: ArenaPlan, group: int, num_tokens: int, *, num_local_tokens: int) -> int:
    """The first block of a group that has to be read: 0 for a state."""
    spec = plan.groups[group].spec
    if isinstance(spec, MambaSpec):
        return 0
    needed = spec.first_needed(num_tokens) if isinstance(spec, SlidingWindowSpec) else 0
    return max(needed, num_local_tokens) // plan.block_size_of(group)


def coalesce(pieces: Iterable[SpanPair]) -> list[SpanPair]:
    """The same copies in as few spans as possible: pieces adjacent on both sides are joined."""
    spans: list[SpanPair] = []
    for piece in pieces:
        last = spans[-1] if spans else None
        if last is not None and _adjacent(last, piece):
            spans[-1] = SpanPair(last.remote, last.local, last.length + piece.length)
        else:
            spans.append(piece)
    return spans


def _adjacent(left: SpanPair, right: SpanPair) -> bool:
    return left.remote + left.length == right.remote and left.local + left.length == right.local
