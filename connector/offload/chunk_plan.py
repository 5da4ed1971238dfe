"""Cuts each KV cache group into chunks, apart from all other groups. Pure; knows sizes only.

A chunk is a number of hash blocks and never spans two blocks. So the block size of one group says
nothing about another's: no common multiple of all sizes is needed.

    tokens      0         64        128       192  201        blocks of 128, chunks of 64
    blocks      |        block 0     |      block 1      ...
    items       | chunk   | chunk    | chunk  |tail|          the tail ends where a sequence ended
    states                                         ^          after 201 tokens, of all Mamba groups
"""

import hashlib
from collections.abc import Iterator, Mapping

import msgspec

from connector.offload.messages import STATES, Item, Key, Place
from engine.errors import ConfigError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.listener import Cached, CachedBlocks, CachedStates
from engine.kv_cache.spec import AttentionSpec

MAX_DEFAULT_CHUNK = 256
"""Tokens: LMCache's chunk. Larger blocks are split into the largest equal parts up to it."""


class ChunkPlan:
    """The chunks of one arena's groups.

    `chunk_tokens[g]`: tokens per chunk of attention group g: `hybrid_chunk_size` where that divides
    the group's block, else the whole block.
    """

    def __init__(self, plan: ArenaPlan, hybrid_chunk_size: int | None = None) -> None:
        """Raises ConfigError for a size that splits no group, naming one that works."""
        self.arena = plan
        sizes = {group: plan.block_size_of(group) for group in plan.attention_groups}
        if hybrid_chunk_size is not None:
            _check(hybrid_chunk_size, plan.hash_block_size, sizes)
        self.chunk_tokens: dict[int, int] = {
            group: _chunk(size, hybrid_chunk_size, plan.hash_block_size)
            for group, size in sizes.items()
        }

    def nbytes(self, item: Item) -> int:
        """Bytes of an item in a tier.

        Attention: the layers' pages one after the other, each [K|V, heads, tokens, head_dim] of its
        tokens only. States: those of each Mamba group, one after the other.
        """
        if item.group == STATES:
            return self.arena.state_bytes
        return (item.end - item.start) * self.token_bytes(item.group)

    def slot_bytes(self) -> dict[int, int]:
        """By group, the bytes of a whole chunk or of all states: what an item needs at most."""
        sizes = {g: size * self.token_bytes(g) for g, size in self.chunk_tokens.items()}
        return {**sizes, STATES: self.arena.state_bytes} if self.arena.state_groups else sizes

    def token_bytes(self, group: int) -> int:
        """Bytes of one token in all layers of an attention group."""
        return self.arena.block_bytes(group) // self.arena.block_size_of(group)

    def geometry(self, model_identity: str, hash_seed: str) -> str:
        """32 hex digits that nodes share whose items can replace each other; never with others."""
        arena = self.arena
        named = [
            (repr(group.spec), group.layers, self.chunk_tokens.get(index, 0))
            for index, group in enumerate(arena.groups)
        ]
        parts = (model_identity, hash_seed, arena.hash_block_size, named)
        return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()[:32]

    def items_of(
        self, cached: Cached, parent: bytes, before: tuple[bytes, ...] = ()
    ) -> Iterator[tuple[Item, Place]]:
        """The items that have become findable.

        `parent`: digest at `cached.start`, or at the last hash boundary before a checkpoint's end.
        `before`: digests from the start of the chunk to before `cached.start`, if that is inside.
        A block that is filled up to a hash boundary inside a chunk gives a tail, which ends there.
        One that is filled from inside a chunk on gives nothing of that chunk.
        """
        if isinstance(cached, CachedStates):
            item = Item(STATES, cached.end, cached.end, cached.digest, (parent,))
            yield item, Place(cached.states)
            return
        step, chunk = self.arena.hash_block_size, self.chunk_tokens[cached.group]
        end, boundaries = cached.start, (*before, parent)
        ends: list[tuple[int, bytes, tuple[bytes, ...]]] = []
        for digest in cached.digests:
            end += step
            if end % chunk == 0 or (end == cached.end and digest == cached.digests[-1]):
                ends.append((end, digest, boundaries))
            boundaries = (digest,) if end % chunk == 0 else (*boundaries, digest)
        if cached.tail is not None:
            ends.append((cached.end, cached.tail, boundaries))
        size = self.arena.block_size_of(cached.group)
        for end, digest, boundaries in ends:
            start = (end - 1) // chunk * chunk
            if start >= cached.filled_from:
                block = cached.blocks[start // size - cached.start // size]
                item = Item(cached.group, start, end, digest, boundaries)
                yield item, Place((block,), start % size)

    def cached(self, item: Item) -> tuple[Cached, bytes]:
        """An item as what is findable in a tier, by its whole hash blocks; and its parent."""
        if item.group == STATES:
            return CachedStates(self.arena.state_groups, item.end, item.digest, ()), item.parent
        parent, *digests = item.boundaries
        if item.end % self.arena.hash_block_size == 0:
            digests.append(item.digest)
        return CachedBlocks(item.group, item.start, item.end, tuple(digests), ()), parent

    def preceding(self, cached: Cached, parent: bytes) -> Key | None:
        """The item after which `cached` goes on inside a chunk; None at the start of a chunk.

        With whole hash blocks it is replaced. Maybe there are only others, which end soon after.
        """
        if isinstance(cached, CachedStates):
            return None
        inside = cached.start % self.chunk_tokens[cached.group]
        return Key(cached.group, parent) if inside else None

    def rows(self, group: int) -> tuple[int, int]:
        """Rows of tokens in a block (layers x K|V x heads), and the bytes of one token in a row."""
        spec = self.arena.groups[group].spec
        assert isinstance(spec, AttentionSpec)
        num_rows = len(self.arena.groups[group].layers) * spec.token_rows
        return num_rows, self.token_bytes(group) // num_rows


def _chunk(block: int, asked: int | None, hash_block: int) -> int:
    if asked is not None:
        return asked if block % asked == 0 else block
    most = min(block, MAX_DEFAULT_CHUNK)
    return max(n for n in range(hash_block, most + 1, hash_block) if block % n == 0)


def _check(asked: int, hash_block: int, sizes: Mapping[int, int]) -> None:
    fits = [size for size in sizes.values() if size % asked == 0]
    if asked % hash_block == 0 and (fits or not sizes):
        return
    works = _chunk(min(sizes.values(), default=hash_block), None, hash_block)
    raise ConfigError(
        f"hybrid_chunk_size {asked} is no whole number of hash blocks of {hash_block} tokens that "
        f"divides a block of {', '.join(map(str, sorted(set(sizes.values()))))} tokens; {works} is"
    )
