"""The byte ranges of one sequence's tokens and states in a node's arena. Pure numbers.

A block holds all layers of its group, page by page; a page is [K|V, heads, tokens, head_dim]:

    block    | page of layer a                        | page of layer b | ...
    page     | K: head 0 | K: head 1 | V: head 0 | V: head 1 |
    head     | token 0 | token 1 | ... | token block_size - 1 |     head_dim values each

Two nodes may group layers and cut blocks differently. They share one order of bytes for given
tokens of given layers: layer by layer, K and then V head by head, token by token. Both nodes name,
hash and pair their bytes in that order.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from connector.pd.wire.geometry import GroupGeometry, describe_spec, geometry_of
from connector.pd.wire.messages import BlockRange
from engine.errors import TransportError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import AttentionSpec, LayerSpec, MambaSpec, SlidingWindowSpec


class Piece(NamedTuple):
    """Bytes that lie together in one arena."""

    offset: int
    length: int


@dataclass(slots=True, frozen=True)
class GroupBlocks:
    """One group's blocks of one sequence: the byte offset of each, from block `first_block` on.

    `filled_from`: the first token that they hold, if it lies inside the first block.
    """

    kept: str
    spec: LayerSpec
    layers: tuple[int, ...]
    block_size: int
    offsets: tuple[int, ...]
    first_block: int = 0
    filled_from: int = 0

    @property
    def is_state(self) -> bool:
        """True if the group keeps one state instead of blocks."""
        return isinstance(self.spec, MambaSpec)

    @property
    def start(self) -> int:
        """The first token that these blocks hold."""
        return max(self.first_block * self.block_size, self.filled_from)

    @property
    def end(self) -> int:
        """One past the last token that these blocks have room for."""
        return (self.first_block + len(self.offsets)) * self.block_size

    @property
    def block_bytes(self) -> int:
        """Bytes of one block or state, all layers together."""
        return len(self.layers) * self._layer_bytes

    def whole(self, asked: BlockRange) -> list[Piece] | None:
        """The blocks of `asked` if both sides cut and group alike, else None; states always do."""
        nbytes, size = self.block_bytes, self.block_size
        if asked.layers != self.layers:
            return None
        if self.is_state:
            return [Piece(self.offsets[0], nbytes)]
        if asked.block_size != size or asked.start % size or asked.end % size:
            return None
        first, end = asked.start // size - self.first_block, asked.end // size - self.first_block
        return [Piece(offset, nbytes) for offset in self.offsets[first:end]]

    def layer(self, layer: int, start: int, end: int) -> Iterator[Piece]:
        """The bytes of tokens `start` to `end` of one layer, head by head; of a state, all."""
        skipped = self.layers.index(layer) * self._layer_bytes
        if not isinstance(self.spec, AttentionSpec):
            yield Piece(self.offsets[0] + skipped, self._layer_bytes)
            return
        heads = self.spec.token_rows
        row = self.spec.page_bytes(1) // heads
        for head in range(heads):
            for first, stop in _parts(start, end, self.block_size):
                number, token = divmod(first, self.block_size)
                page = self.offsets[number - self.first_block] + skipped
                yield Piece(page + (head * self.block_size + token) * row, (stop - first) * row)

    @property
    def _layer_bytes(self) -> int:
        if isinstance(self.spec, MambaSpec):
            return self.spec.layer_bytes
        return self.spec.page_bytes(self.block_size)


@dataclass(slots=True, frozen=True)
class SequenceBlocks:
    """All blocks and states that one node keeps of one sequence."""

    groups: tuple[GroupBlocks, ...]

    @property
    def num_blocks(self) -> int:
        """Blocks and states of all groups together."""
        return sum(len(group.offsets) for group in self.groups)

    def whole_blocks(self) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of every block, states last: the order of digests in a lease's record."""
        for group in sorted(self.groups, key=lambda group: group.is_state):
            yield from zip(group.offsets, repeat(group.block_bytes))

    def owners(self, asked: BlockRange) -> list[GroupBlocks]:
        """The group of each layer. Raises TransportError for a layer that keeps something else."""
        return [self._owner(asked.kept, layer) for layer in asked.layers]

    def blocks(self, asked: BlockRange) -> Iterator[tuple[Piece, ...]]:
        """The bytes of each block of `asked`, in the common order, in as few pieces as possible.

        Raises TransportError for layers, tokens or block sizes that this node does not have.
        """
        owners = self.owners(asked)
        if not owners or asked.block_size < 1:
            raise TransportError(f"{asked} names no layer or no block size")
        first = owners[0]
        if not first.is_state and not all(
            owner.start <= asked.start <= asked.end <= owner.end for owner in owners
        ):
            raise TransportError(f"tokens {asked.start} to {asked.end} are not all here")
        whole = first.whole(asked)
        if whole is not None:
            yield from zip(whole)
            return
        # Otherwise layer by layer; a state is one block, whatever the token numbers say.
        layers = list(zip(asked.layers, owners, strict=True))
        parts = [(0, 1)] if first.is_state else _parts(asked.start, asked.end, asked.block_size)
        for start, end in parts:
            yield tuple(
                joined(it for layer, owner in layers for it in owner.layer(layer, start, end))
            )

    def _owner(self, kept: str, layer: int) -> GroupBlocks:
        for group in self.groups:
            if layer in group.layers and group.kept == kept:
                return group
        raise TransportError(f"layer {layer} keeps no {kept!r} here")


def blocks_here(plan: ArenaPlan, tables: Sequence[Sequence[int]]) -> SequenceBlocks:
    """A sequence of this node; `tables[g]` are its blocks in group g, from the first token on."""
    pairs = zip(geometry_of(plan), plan.groups, tables, strict=True)
    return SequenceBlocks(
        tuple(_located(geometry, group.spec, ids) for geometry, group, ids in pairs)
    )


def blocks_announced(
    plan: ArenaPlan,
    geometry: Sequence[GroupGeometry],
    block_ids: Sequence[Sequence[int]],
    *,
    num_tokens: int,
    filled_from: Sequence[int] | None = None,
) -> SequenceBlocks:
    """The blocks that hold the first `num_tokens` tokens in an arena with groups `geometry`.

    Of a sliding window's group only the last blocks are announced, and by `filled_from` the first
    token that they hold, where they do not hold all of theirs. `plan` is this node's; it gives the
    specs. Raises TransportError if groups or blocks are not those that these tokens need.
    """
    if len(geometry) != len(block_ids):
        raise TransportError(
            f"{len(block_ids)} KV cache groups announced by a peer that has {len(geometry)}"
        )
    specs = {describe_spec(group.spec): group.spec for group in plan.groups}
    starts = [0] * len(geometry) if filled_from is None else filled_from
    if len(starts) != len(geometry):
        raise TransportError(f"remote_filled_from names {len(starts)} groups of {len(geometry)}")
    return SequenceBlocks(
        tuple(
            _announced(specs, group, ids, num_tokens=num_tokens, filled_from=start)
            for group, ids, start in zip(geometry, block_ids, starts, strict=True)
        )
    )


def joined(pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The same bytes in the same order, with adjacent pieces joined."""
    last: Piece | None = None
    for piece in pieces:
        if last is not None and last.offset + last.length == piece.offset:
            last = Piece(last.offset, last.length + piece.length)
            continue
        if last is not None:
            yield last
        last = piece
    if last is not None:
        yield last


def _parts(start: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """`start` to `end`, cut at the multiples of `size`."""
    while start < end:
        stop = min(end, (start // size + 1) * size)
        yield start, stop
        start = stop


def _announced(
    specs: Mapping[str, LayerSpec],
    geometry: GroupGeometry,
    block_ids: Sequence[int],
    *,
    num_tokens: int,
    filled_from: int,
) -> GroupBlocks:
    spec = specs.get(geometry.spec)
    if spec is None:
        raise TransportError(f"the peer announced blocks of {geometry.spec!r}: not kept here")
    # All blocks of these tokens, or, with a sliding window, at least those inside it:
    #
    #   blocks      0   1   2   3   4 = most - 1
    #   announced           |---|---|   block_ids; first_block = most - len(block_ids)
    least = most = 1
    if not isinstance(spec, MambaSpec):
        least = most = -(-num_tokens // geometry.block_size)
    needed = spec.first_needed(num_tokens) if isinstance(spec, SlidingWindowSpec) else 0
    least -= needed // geometry.block_size
    if filled_from > needed:
        raise TransportError(
            f"the peer holds {geometry.spec!r} from token {filled_from} on, not from {needed} on"
        )
    if not least <= len(block_ids) <= most:
        raise TransportError(
            f"{len(block_ids)} blocks announced for {num_tokens} tokens of {geometry.spec!r}; "
            f"{least} to {most} expected"
        )
    first_block = most - len(block_ids)
    return _located(geometry, spec, block_ids, first_block=first_block, filled_from=filled_from)


def _located(
    geometry: GroupGeometry,
    spec: LayerSpec,
    block_ids: Sequence[int],
    *,
    first_block: int = 0,
    filled_from: int = 0,
) -> GroupBlocks:
    offsets, size = tuple(map(geometry.offset, block_ids)), geometry.block_size
    return GroupBlocks(
        geometry.spec, spec, geometry.layers, size, offsets, first_block, filled_from
    )
