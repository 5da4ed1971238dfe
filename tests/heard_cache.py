"""A cache as its listener sees it: what is findable, rebuilt from the calls alone.

Every call is checked when it comes: parents before children on the way in, children first on the
way out, content intact until it goes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from engine.kv_cache.listener import Cached, CachedStates
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.spec import FullAttentionSpec

Text = tuple[str | None, tuple[int, ...]]  # a salt and tokens


@dataclass(frozen=True)
class Item:
    """One block of an attention group, or the states of all Mamba groups (`group`: the first)."""

    group: int
    start: int
    end: int
    ids: tuple[int, ...]


class HeardCache:
    """`items[group]`: what is findable in a group, by its text; `check(item, text)`: its bytes."""

    def __init__(self, plan: ArenaPlan, check: Callable[[Item, Text], None]) -> None:
        self.plan = plan
        self.check = check
        self.texts: dict[bytes, Text] = {}
        self.items: list[dict[Text, Item]] = [{} for _ in plan.groups]
        self.going: set[Item] = set()
        self.resets = False

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

    def evicting(self, cached: Cached) -> None:
        for item, digest in self.items_of(cached):
            assert self.items[item.group][self.texts[digest]] == item
            self.check(item, self.texts[digest])
            self.going.add(item)

    def removed(self, cached: Cached) -> None:
        for item, digest in self.items_of(cached):
            assert self.items[item.group].pop(self.texts[digest]) == item
            assert self.resets or item in self.going, "gone without a word"
            self.going.discard(item)
        for text, item in self.items[_group(cached)].items():
            self.check_parent(item, text)

    def cleared(self) -> None:
        assert not any(self.items)

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
