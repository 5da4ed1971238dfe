"""Models of a KV cache: the content of its bytes, and the findable part of it."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.listener import Cached, CachedStates
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from engine.kv_cache.tables import NULL_BLOCK, BlockCopy, BlockTables

Text = tuple[str | None, tuple[int, ...]]  # a salt and tokens


@dataclass(frozen=True)
class Item:
    """One block of an attention group, or the states of all Mamba groups (`group`: the first)."""

    group: int
    start: int
    end: int
    ids: tuple[int, ...]


@dataclass(eq=False)
class Live:
    """One request of the machine."""

    tokens: list[int]
    salt: str | None
    prefix: PrefixDigests
    num_prompt: int
    tables: BlockTables | None = None
    computed: int = 0
    branch_point: int = 0
    hit: int = 0
    loading: PrefixHit | None = None


class Contents:
    """For each attention slot and each state, the whole token prefix that computed it."""

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self.content: dict[tuple[int, int], Any] = {}

    def is_state(self, group: int) -> bool:
        return isinstance(self.plan.groups[group].spec, MambaSpec)

    def first_read(self, group: int, n: int) -> int:
        """The next token, at position n, reads positions n - window + 1 to n."""
        spec = self.plan.groups[group].spec
        return max(0, n + 1 - spec.window) if isinstance(spec, SlidingWindowSpec) else 0

    def zero_and_copy(self, new: Iterable[tuple[int, int]], copies: Iterable[BlockCopy]) -> None:
        """The worker's part of a step before it computes."""
        for group, state in new:
            self.content[group, state] = ()
        for copy in copies:
            held = self.content[copy.group, copy.source]
            self.content[copy.group, copy.target] = dict(held) if isinstance(held, dict) else held

    def write_state(self, group: int, state: int, tokens: Sequence[int]) -> None:
        self.content[group, state] = tuple(tokens)

    def write_states(self, request: Live, groups: Iterable[int], end: int) -> None:
        assert request.tables is not None
        for group in groups:
            self.content[group, request.tables.groups[group][0]] = tuple(request.tokens[:end])

    def write_attention(self, request: Live, start: int, end: int) -> None:
        assert request.tables is not None
        for group, blocks in enumerate(request.tables.groups):
            if self.is_state(group):
                continue
            size = self.plan.block_size_of(group)
            for position in range(start, end):
                block = blocks[position // size]
                if block == NULL_BLOCK:
                    continue
                slots = self.content.setdefault((group, block), {})
                if not isinstance(slots, dict):
                    slots = self.content[group, block] = {}
                slots[position % size] = tuple(request.tokens[: position + 1])

    def check_states(self, request: Live, groups: Iterable[int], num_tokens: int) -> None:
        assert request.tables is not None
        for group in groups:
            state = request.tables.groups[group][0]
            assert self.content[group, state] == tuple(request.tokens[:num_tokens])

    def check_attention(self, request: Live) -> None:
        assert request.tables is not None
        for group, blocks in enumerate(request.tables.groups):
            if self.is_state(group):
                continue
            size = self.plan.block_size_of(group)
            first = self.first_read(group, request.computed)
            for position in range(first, request.computed):
                slots = self.content[group, blocks[position // size]]
                assert slots[position % size] == tuple(request.tokens[: position + 1])

    def check_item(self, item: Item, text: Text) -> None:
        """A block or state that the cache names holds what it says."""
        tokens = text[1]
        if self.is_state(item.group):
            for group, state in zip(self.plan.state_groups, item.ids, strict=True):
                assert self.content[group, state] == tokens
            return
        slots, size = self.content[item.group, item.ids[0]], self.plan.block_size_of(item.group)
        for position in range(item.start, item.end):
            assert slots[position % size] == tokens[: position + 1]


class HeardCache:
    """A cache as its listener sees it: what is findable, rebuilt from the calls alone.

    Every call is checked when it comes: parents before children on the way in, children first on
    the way out, content intact until it goes. `items[group]`: what is findable in a group, by its
    text. `check(item, text)` compares its bytes.
    """

    def __init__(self, plan: ArenaPlan, check: Callable[[Item, Text], None]) -> None:
        self.plan = plan
        self.check = check
        self.texts: dict[bytes, Text] = {}
        self.items: list[dict[Text, Item]] = [{} for _ in plan.groups]

    def learn(self, digest: bytes, text: Text) -> None:
        assert self.texts.setdefault(digest, text) == text, "two texts have one digest"

    def stored(self, cached: Cached, parent: bytes, token_ids: tuple[int, ...]) -> None:
        salt, before = self.texts[parent]
        whole = (*before, *token_ids)
        assert len(whole) == cached.end
        self.learn(_last_digest(cached), (salt, whole))
        for item, digest in self.items_of(cached):
            text = (salt, whole[: item.end])
            assert self.texts[digest] == text
            assert text not in self.items[item.group], "stored twice"
            self.items[item.group][text] = item
            self.check_parent(item, text)
            self.check(item, text)

    def removed(self, cached: Cached) -> None:
        for item, digest in self.items_of(cached):
            assert self.items[item.group].pop(self.texts[digest]) == item
            self.check(item, self.texts[digest])
        for text, item in self.items[_group(cached)].items():
            self.check_parent(item, text)

    def check_parent(self, item: Item, text: Text) -> None:
        salt, tokens = text
        if item.start and isinstance(self.plan.groups[item.group].spec, FullAttentionSpec):
            assert (salt, tokens[: item.start]) in self.items[item.group], "an orphan"

    def items_of(self, cached: Cached) -> Iterator[tuple[Item, bytes]]:
        if isinstance(cached, CachedStates):
            yield Item(cached.groups[0], cached.end, cached.end, cached.states), cached.digest
            return
        size = self.plan.block_size_of(cached.group)
        stride = size // self.plan.hash_block_size if cached.end % size == 0 else 1
        assert len(cached.digests) == stride * len(cached.blocks)
        for place, block in enumerate(cached.blocks):
            start = cached.start + place * size
            item = Item(cached.group, start, min(start + size, cached.end), (block,))
            yield item, cached.digests[(place + 1) * stride - 1]

    def path(self, group: int, text: Text) -> set[int]:
        """The blocks that have to stay while the one that ends `text` is in use."""
        salt, tokens = text
        item = self.items[group][text]
        if not isinstance(self.plan.groups[group].spec, FullAttentionSpec) or not item.start:
            return set(item.ids)
        return {*item.ids, *self.path(group, (salt, tokens[: item.start]))}


def _last_digest(cached: Cached) -> bytes:
    return cached.digest if isinstance(cached, CachedStates) else cached.digests[-1]


def _group(cached: Cached) -> int:
    return cached.groups[0] if isinstance(cached, CachedStates) else cached.group
