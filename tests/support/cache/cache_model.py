"""Models of a KV cache: the content of its bytes, and the findable part of it."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.coordinator import PrefixHit
from engine.kv_cache.listener import Cached, CachedStates
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, SlidingWindowSpec
from engine.kv_cache.tables import NULL_BLOCK, BlockCopy, BlockTables

Text = tuple[str | None, tuple[int, ...]]  # a salt and tokens
Copy = tuple[Text, tuple[int, ...]]  # a prefix, and the block or states that hold its end
Findable = tuple[int, bytes, tuple[int, ...]]  # group, digest, and ids as of a copy


@dataclass(frozen=True)
class Item:
    """A block of an attention group up to `end`, or the states of all Mamba groups.

    `group`: of states the first. `filled_from`: the first token that its block holds.
    """

    group: int
    start: int
    end: int
    ids: tuple[int, ...]
    filled_from: int = 0


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


def longest_start(
    limit: int, attention: Callable[[int], bool], states: Callable[[int], bool]
) -> int:
    """By definition: the last position of at most `limit` where all that it needs is there."""
    return max(n for n in range(limit + 1) if attention(n) and (n == 0 or states(n)))


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

    def write_attention(
        self, request: Live, start: int, end: int, filled_from: Sequence[int] = ()
    ) -> None:
        """K/V of tokens `start` to `end`; of group g none before `filled_from[g]`."""
        assert request.tables is not None
        for group, blocks in enumerate(request.tables.groups):
            if self.is_state(group):
                continue
            size = self.plan.block_size_of(group)
            first = max(start, filled_from[group]) if filled_from else start
            for position in range(first, end):
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
        for position in range(max(item.start, item.filled_from), item.end):
            assert slots[position % size] == tokens[: position + 1]


class HeardCache:
    """A cache as its listener sees it: what is findable, rebuilt from the calls alone.

    Every call is checked when it comes: parents before children on the way in, children first on
    the way out, content intact until it goes. `items[group]`: what is findable in a group, every
    copy of it, by text and ids. `check(item, text)` compares its bytes.
    """

    def __init__(self, plan: ArenaPlan, check: Callable[[Item, Text], None]) -> None:
        self.plan = plan
        self.check = check
        self.texts: dict[bytes, Text] = {}
        self.digests: dict[Text, bytes] = {}
        self.items: list[dict[Copy, Item]] = [{} for _ in plan.groups]

    def learn(self, digest: bytes, text: Text) -> None:
        assert self.texts.setdefault(digest, text) == text, "two texts have one digest"
        assert self.digests.setdefault(text, digest) == digest, "one text has two digests"

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[int, ...],
        *,
        cache_salt: str | None,
    ) -> None:
        salt, before = self.texts[parent]
        whole = (*before, *token_ids)
        assert (salt, len(whole)) == (cache_salt, cached.end)
        self.check_parent_of(cached, len(before))
        self.learn(_last_digest(cached), (salt, whole))
        for item, digest in self.items_of(cached):
            text = (salt, whole[: item.end])
            assert self.texts[digest] == text
            self.check_parent(item, text)
            assert not item.filled_from or item.start < item.filled_from, "it lacks nothing"
            self.add(item, text)
            self.check(item, text)

    def add(self, item: Item, text: Text) -> None:
        group = item.group
        assert (text, item.ids) not in self.items[group], "one copy is stored twice"
        if self.is_whole(item) or item.end % self.plan.hash_block_size:
            assert text not in self.found(group), "equal blocks are stored twice"
        self.items[group][text, item.ids] = item

    def is_whole(self, item: Item) -> bool:
        """True for states and whole blocks, not for a part of one."""
        if isinstance(self.plan.groups[item.group].spec, MambaSpec):
            return True
        return item.end - item.start == self.plan.block_size_of(item.group)

    def found(self, group: int) -> set[Text]:
        """All prefixes that end at something findable."""
        return {text for text, _ in self.items[group]}

    def everything(self) -> Counter[Findable]:
        """All that is findable, as `walk` counts it."""
        return Counter(
            (group, self.digests[text], ids)
            for group, items in enumerate(self.items)
            for text, ids in items
        )

    def removed(self, cached: Cached) -> None:
        for item, digest in self.items_of(cached):
            text = self.texts[digest]
            assert self.items[item.group].pop((text, item.ids)) == item
            self.check(item, text)
        for (text, _), item in self.items[_group(cached)].items():
            self.check_parent(item, text)

    def check_parent_of(self, cached: Cached, num_before: int) -> None:
        """Tokens are told from the start of blocks on, or of a checkpoint's last hash block."""
        size = self.plan.hash_block_size
        last = (cached.end - 1) // size * size
        assert num_before == (last if isinstance(cached, CachedStates) else cached.start)

    def check_parent(self, item: Item, text: Text) -> None:
        """Whole blocks come before what follows them, and hash blocks of a block in order."""
        if isinstance(self.plan.groups[item.group].spec, MambaSpec):
            return
        (salt, tokens), items = text, self.items[item.group]
        before = (item.end - 1) // self.plan.hash_block_size * self.plan.hash_block_size
        if before > max(item.start, item.filled_from):
            assert ((salt, tokens[:before]), item.ids) in items, "a gap inside a block"
        elif item.start and isinstance(self.plan.groups[item.group].spec, FullAttentionSpec):
            whole = (salt, tokens[: item.start])
            assert any(text == whole and self.is_whole(i) for (text, _), i in items.items())

    def items_of(self, cached: Cached) -> Iterator[tuple[Item, bytes]]:
        """Everything that a call names: each hash block of each block, and a tail."""
        if isinstance(cached, CachedStates):
            yield Item(cached.groups[0], cached.end, cached.end, cached.states), cached.digest
            return
        size, step = self.plan.block_size_of(cached.group), self.plan.hash_block_size
        assert cached.start % step == 0 and (cached.tail is None) == (cached.end % step == 0)
        ends = range(cached.start + step, cached.end + 1, step)
        named = list(zip(ends, cached.digests, strict=True))
        if cached.tail is not None:
            named.append((cached.end, cached.tail))
        first = cached.start // size
        assert named and len(cached.blocks) == -(-cached.end // size) - first
        for end, digest in named:
            index = (end - 1) // size
            ids = (cached.blocks[index - first],)
            yield Item(cached.group, index * size, end, ids, cached.filled_from), digest

    def path(self, copy: Copy, item: Item) -> set[int]:
        """The blocks that have to stay while a copy is in use."""
        (salt, tokens), ids = copy
        if not isinstance(self.plan.groups[item.group].spec, FullAttentionSpec) or not item.start:
            return set(ids)
        before = (salt, tokens[: item.start])
        items = self.items[item.group].items()
        whole = next((own, i) for own, i in items if own[0] == before and self.is_whole(i))
        return {*ids, *self.path(*whole)}


def walk(pool: BlockPool) -> Counter[Findable]:
    """Everything that the trees of a pool can find, node by node."""
    found: Counter[Findable] = Counter()
    for group, tree in enumerate(pool.trees):
        by_key = {node for tails in tree.partial.values() for node in tails.values()}
        inside = {node for nodes in tree.inside.values() for node in nodes}
        for node in {*tree.root.descendants(), *tree.whole.values(), *by_key, *inside}:
            is_state = group in pool.plan.state_groups
            ids = [tuple(node.blocks)] if is_state else [(block,) for block in node.blocks]
            found.update((group, key.digest, ids[0]) for key in node.keys)
            front = node.filled_from // pool.plan.hash_block_size - node.start * tree.stride
            for place, digest in enumerate(node.digests or node.inner):
                if place < front:
                    continue  # nothing of it is there
                found[group, digest, ids[place // tree.stride]] += 1
    return found


def _last_digest(cached: Cached) -> bytes:
    if isinstance(cached, CachedStates):
        return cached.digest
    return cached.tail or cached.digests[-1]


def _group(cached: Cached) -> int:
    return cached.groups[0] if isinstance(cached, CachedStates) else cached.group
