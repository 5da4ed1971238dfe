"""Tokens to byte spans: which bytes of P's arena go where in D's. Pure numbers.

A block holds all layers of its group, page by page, and a page is [K|V, heads, tokens, head_dim].
Where P and D cut and group alike, a block is one piece; else a piece is what lies together on both
sides, down to some tokens of one head. Neighbours on both sides become one span.

    P  |b7|b8|b9|..|b3|        D  |b0|b1|b2|b3|
        \\_______/    |             \\_______/  |
         one span   one span
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from connector.pd.geometry import GroupGeometry, describe_spec
from connector.transports.base import SpanPair
from engine.errors import TransportError
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import AttentionSpec, MambaSpec, SlidingWindowSpec


class GroupPull(NamedTuple):
    """One group's part, block by block, from number `first_block` of those that P announced on."""

    blocks: tuple[SpanPair, ...]
    first_block: int
    is_state: bool


@dataclass(slots=True, frozen=True)
class PullPlan:
    """What one pull reads: `num_pieces` before neighbours were joined, and bytes by kind.

    `groups`: the same block by block, for each of P's groups; empty when a block of P does not come
    as a whole, because D cuts or groups otherwise.
    """

    spans: tuple[SpanPair, ...]
    attention_bytes: int
    state_bytes: int
    num_pieces: int
    groups: tuple[GroupPull, ...] = ()


@dataclass(slots=True, frozen=True)
class RemoteGroup:
    """A group of P, and where the blocks of one prefill start: byte offsets, the last ones of all.

    Blocks that a window has left behind are not announced.
    """

    geometry: GroupGeometry
    offsets: tuple[int, ...]


def remote_groups(
    geometry: Sequence[GroupGeometry], offsets: Sequence[tuple[int, ...]]
) -> tuple[RemoteGroup, ...]:
    """P's groups with what it announced of each. Raises TransportError when they do not match."""
    if len(geometry) != len(offsets):
        raise TransportError(
            f"{len(offsets)} KV cache groups announced by a peer that has {len(geometry)}"
        )
    return tuple(map(RemoteGroup, geometry, offsets))


def plan_pull(
    plan: ArenaPlan,
    remote: Sequence[RemoteGroup],
    local_tables: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    num_local_tokens: int,
) -> PullPlan:
    """Spans that fill `local_tables` with `num_tokens` tokens, of which the first are here already.

    P's layers must keep what D's keep (`check_geometry`). Raises TransportError when P announces
    other blocks than these tokens need.
    """
    for group in remote:
        _check_announced(plan, group, num_tokens)
    parts = [
        _GroupPart(plan, number, blocks, remote, num_tokens, num_local_tokens)
        for number, blocks in enumerate(local_tables)
    ]
    pieces = [tuple(part.pieces()) for part in parts]
    sizes = {True: 0, False: 0}
    for part, own in zip(parts, pieces, strict=True):
        sizes[part.is_state] += sum(piece.length for piece in own)
    spans = tuple(coalesce(piece for own in pieces for piece in own))
    groups = _by_remote_group(parts, pieces, len(remote))
    return PullPlan(spans, sizes[False], sizes[True], sum(map(len, pieces)), groups)


def _by_remote_group(
    parts: Sequence["_GroupPart"], pieces: Sequence[tuple[SpanPair, ...]], num_remote: int
) -> tuple[GroupPull, ...]:
    """What is read of each of P's groups, if all of it is whole blocks."""
    twins = [part.twin() for part in parts]
    if sorted(twin for twin in twins if twin is not None) != list(range(num_remote)):
        return ()
    found = zip(twins, parts, pieces, strict=True)
    pulls = {twin: GroupPull(own, part.first_block(), part.is_state) for twin, part, own in found}
    return tuple(pulls[number] for number in range(num_remote)) if None not in twins else ()


@dataclass(slots=True, frozen=True)
class _GroupPart:
    """One of D's groups."""

    plan: ArenaPlan
    number: int
    blocks: Sequence[int]
    remote: Sequence[RemoteGroup]
    num_tokens: int
    num_local_tokens: int

    @property
    def is_state(self) -> bool:
        return isinstance(self.plan.groups[self.number].spec, MambaSpec)

    def pieces(self) -> Iterator[SpanPair]:
        """In the order of D's blocks."""
        twin = self.twin()
        if self.is_state:
            yield from self._states() if twin is None else self._whole_states(self.remote[twin])
        else:
            yield from self._tokens() if twin is None else self._whole_blocks(self.remote[twin])

    def twin(self) -> int | None:
        """The number of P's group with the same layers and blocks."""
        group = self.plan.groups[self.number]
        block_size = self.plan.block_size_of(self.number)
        for number, other in enumerate(self.remote):
            same = other.geometry.layers == group.layers and self._keeps_the_same(other)
            if same and (self.is_state or other.geometry.block_size == block_size):
                return number
        return None

    def first_block(self) -> int:
        """The first block that is read, among those that the twin announced."""
        twin = self.twin()
        if self.is_state or twin is None:
            return 0
        size = self.plan.block_size_of(self.number)
        skipped = -(-self.num_tokens // size) - len(self.remote[twin].offsets)
        return self._first_token() // size - skipped

    def _keeps_the_same(self, other: RemoteGroup) -> bool:
        return other.geometry.spec == describe_spec(self.plan.groups[self.number].spec)

    def _first_token(self) -> int:
        """The first token that has to be read; a block's first one."""
        spec = self.plan.groups[self.number].spec
        needed = spec.first_needed(self.num_tokens) if isinstance(spec, SlidingWindowSpec) else 0
        size = self.plan.block_size_of(self.number)
        return max(needed, self.num_local_tokens) // size * size

    def _whole_states(self, twin: RemoteGroup) -> Iterator[SpanPair]:
        length = self.plan.block_bytes(self.number)
        yield SpanPair(twin.offsets[0], self._local(self.blocks[0]), length)

    def _whole_blocks(self, twin: RemoteGroup) -> Iterator[SpanPair]:
        length = self.plan.block_bytes(self.number)
        size = self.plan.block_size_of(self.number)
        skipped = -(-self.num_tokens // size) - len(twin.offsets)
        first = self._first_token() // size
        for place in range(first, len(self.blocks)):
            remote = twin.offsets[place - skipped]
            yield SpanPair(remote, self._local(self.blocks[place]), length)

    def _states(self) -> Iterator[SpanPair]:
        """Layer by layer."""
        group = self.plan.groups[self.number]
        assert isinstance(group.spec, MambaSpec)
        length = group.spec.layer_bytes
        for place, layer in enumerate(group.layers):
            other, there = self._find(layer)
            local = self._local(self.blocks[0]) + place * length
            yield SpanPair(other.offsets[0] + there * length, local, length)

    def _tokens(self) -> Iterator[SpanPair]:
        """Runs of tokens that no block boundary cuts, layer by layer and head by head."""
        group, size = self.plan.groups[self.number], self.plan.block_size_of(self.number)
        spec = group.spec
        assert isinstance(spec, AttentionSpec)
        for place, layer in enumerate(group.layers):
            other, there = self._find(layer)
            remote_size = other.geometry.block_size
            skipped = -(-self.num_tokens // remote_size) - len(other.offsets)
            for start, count in _runs(self._first_token(), self.num_tokens, size, remote_size):
                remote = other.offsets[start // remote_size - skipped]
                remote += there * spec.page_bytes(remote_size)
                local = self._local(self.blocks[start // size]) + place * spec.page_bytes(size)
                for head in range(2 * spec.num_kv_heads):
                    yield SpanPair(
                        remote + (head * remote_size + start % remote_size) * _row_bytes(spec),
                        local + (head * size + start % size) * _row_bytes(spec),
                        count * _row_bytes(spec),
                    )

    def _find(self, layer: int) -> tuple[RemoteGroup, int]:
        """P's group that keeps the same for a layer, and the layer's place in it."""
        for other in self.remote:
            if layer in other.geometry.layers and self._keeps_the_same(other):
                return other, other.geometry.layers.index(layer)
        raise TransportError(f"layer {layer} is not among what the peer announced")

    def _local(self, block: int) -> int:
        return self.plan.block_offset(self.number, block)


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


def _runs(start: int, end: int, *sizes: int) -> Iterator[tuple[int, int]]:
    """(first token, count) of stretches that no block boundary of any size cuts."""
    while start < end:
        stop = min(end, *((start // size + 1) * size for size in sizes))
        yield start, stop - start
        start = stop


def _row_bytes(spec: AttentionSpec) -> int:
    """One token of one head, K or V."""
    return spec.page_bytes(1) // (2 * spec.num_kv_heads)


def _check_announced(plan: ArenaPlan, group: RemoteGroup, num_tokens: int) -> None:
    """As many blocks as these tokens fill, without those that lie wholly behind the window."""
    spec = next(
        (own.spec for own in plan.groups if describe_spec(own.spec) == group.geometry.spec), None
    )
    if spec is None:
        raise TransportError(f"the peer announced blocks of {group.geometry.spec!r}: not kept here")
    size = group.geometry.block_size
    most = 1 if isinstance(spec, MambaSpec) else -(-num_tokens // size)
    needed = spec.first_needed(num_tokens) if isinstance(spec, SlidingWindowSpec) else 0
    least = 1 if isinstance(spec, MambaSpec) else most - needed // size
    if not least <= len(group.offsets) <= most:
        raise TransportError(
            f"{len(group.offsets)} blocks announced for {num_tokens} tokens of "
            f"{group.geometry.spec!r}; {least} to {most} expected"
        )
