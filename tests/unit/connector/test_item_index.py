"""The index of items against a search over plain token prefixes."""

from bisect import bisect_left
from collections.abc import Callable
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.index import Entry, ItemIndex
from connector.offload.messages import STATES, Item, Place
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.coverage import longest_joint
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.spec import (
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    SlidingWindowSpec,
    StatePart,
)
from tests.support.cache.cache_model import longest_start

Tokens = tuple[int, ...]
FULL = FullAttentionSpec(1, 8, "float32")
WINDOW = SlidingWindowSpec(1, 8, "float32", window=40)
NARROW = SlidingWindowSpec(2, 8, "float32", window=13)
STATE = MambaSpec("mamba2", (StatePart((3, 32)), StatePart((2, 16, 8))))
MIXES = {
    "attention": (FULL,),
    "hybrid": (FULL, STATE),
    "windows": (WINDOW, FULL, NARROW),
    "all": (STATE, WINDOW, FULL),
}
CUTS = ((16, 16, None), (64, 16, 16), (64, 16, 32), (64, 16, None), (64, 8, None), (2176, 16, None))
"""Tokens of a block, of a hash block, and of a chunk as it is asked for."""
PLACE = Place((0,))


class Model:
    """An index, and what it should know: items by group and by the tokens of their prefix."""

    def __init__(self, mix: str, cut: tuple[int, int, int | None]) -> None:
        block, hash_block, chunk = cut
        groups = tuple(KVCacheGroup(spec, (at,)) for at, spec in enumerate(MIXES[mix]))
        self.plan = plan_arena(groups, block, 1 << 26, hash_block_size=hash_block)
        self.chunks = ChunkPlan(self.plan, chunk)
        self.index = ItemIndex(self.chunks)
        self.hasher = PrefixHasher(hash_block)
        self.known: dict[tuple[int, Tokens], Entry] = {}

    def prefix(self, tokens: Tokens) -> PrefixDigests:
        return PrefixDigests(self.hasher, list(tokens), None)

    def item(self, group: int, tokens: Tokens) -> Item:
        """The item of one group that ends with these tokens."""
        step, prefix, end = self.plan.hash_block_size, self.prefix(tokens), len(tokens)
        last = (end - 1) // step
        first = last
        start = end
        if group != STATES:
            start = (end - 1) // self.chunks.chunk_tokens[group] * self.chunks.chunk_tokens[group]
            first = start // step
        boundaries = tuple(prefix.boundaries()[first : last + 1])
        return Item(group, start, end, prefix.digest_at(end), boundaries)

    def add(self, group: int, tokens: Tokens) -> None:
        entry = self.index.add(self.item(group, tokens))
        entry.places = [PLACE]
        self.known[group, tokens] = entry

    def drop(self, group: int, tokens: Tokens) -> None:
        entry = self.known.pop((group, tokens))
        entry.places.clear()
        self.index.drop_if_gone(entry)

    # --- by definition ---------------------------------------------------------------------------

    def lacks(self, group: int, tokens: Tokens) -> list[int]:
        """The positions of a prompt that no item of one group holds."""
        held: set[int] = set()
        for (one, prefix), entry in self.known.items():
            if one == group:
                held.update(range(entry.item.start, self.shared(tokens, prefix)))
        return [position for position in range(len(tokens)) if position not in held]

    def shared(self, tokens: Tokens, prefix: Tokens) -> int:
        """How many of a prompt's tokens an item that ends with `prefix` can stand for."""
        if tokens[: len(prefix)] == prefix:
            return len(prefix)
        pairs = zip(tokens, prefix, strict=False)
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
        return same // self.plan.hash_block_size * self.plan.hash_block_size

    def is_there(self, group: int, lacking: list[int], end: int) -> bool:
        """True if one group has all that the token after `end` reads."""
        spec = self.plan.groups[group].spec
        size = self.plan.block_size_of(group)  # blocks are loaded from their start
        first = spec.first_needed(end) // size * size if isinstance(spec, SlidingWindowSpec) else 0
        return bisect_left(lacking, first) == bisect_left(lacking, end)

    def attention(self, tokens: Tokens) -> Callable[[int], bool]:
        """Whether all attention groups have what is read after so many tokens."""
        lacking = {group: self.lacks(group, tokens) for group in self.chunks.chunk_tokens}
        return lambda n: all(self.is_there(group, one, n) for group, one in lacking.items())


def check(model: Model, tokens: Tokens, limit: int) -> None:
    """Asserts that the index says of one prompt what the search finds."""
    prefix = model.prefix(tokens)
    coverage = model.index.coverage(prefix)
    reach = coverage.attention(limit)
    assert reach == longest_start(limit, model.attention(tokens), lambda n: True)
    start = longest_joint(reach, [coverage.attention, coverage.states])
    has_states = lambda n: (STATES, tokens[:n]) in model.known  # noqa: E731
    assert start == longest_start(limit, model.attention(tokens), has_states)
    for group in model.chunks.chunk_tokens:
        first = model.index.first_needed(group, reach)
        check_items(model, tokens, group=group, span=(first, reach))
        check_items(model, tokens, group=group, span=(limit // 3, limit))


def check_items(model: Model, tokens: Tokens, *, group: int, span: tuple[int, int]) -> None:
    """The items of a span follow each other and hold its tokens, before the first missing one."""
    start, end = span
    lacking, chunk = model.lacks(group, tokens), model.chunks.chunk_tokens[group]
    at = start // chunk * chunk
    for entry in model.index.attention(model.prefix(tokens), group, span):
        item = entry.item
        assert item.start == at
        (ending,) = (text for (g, text), e in model.known.items() if e is entry and g == group)
        assert model.shared(tokens, ending) >= min(end, at + chunk)
        at += chunk
    assert at >= end or any(at <= position < min(end, at + chunk) for position in lacking)


@st.composite
def prompts(draw: st.DrawFn, longest: int) -> list[Tokens]:
    """Prompts that leave each other at any token."""
    made: list[Tokens] = []
    for number in range(draw(st.integers(1, 3))):
        base = draw(st.sampled_from(made)) if made else ()
        kept, length = draw(st.integers(0, len(base))), draw(st.integers(1, longest))
        own = range(10_000 * number + 2, 10_000 * number + 2 + length)  # nobody else's tokens
        made.append((*base[:kept], *own)[:longest])
    return made


def fill(model: Model, tokens: Tokens, data: st.DataObject) -> None:
    """Most chunks of a prompt, and some tails and states."""
    length = len(tokens)
    ends = st.lists(st.integers(1, length), max_size=4)
    for group, chunk in model.chunks.chunk_tokens.items():
        holes = data.draw(st.sets(st.integers(1, length), max_size=2))
        missing = {hole // chunk for hole in holes}
        for end in range(chunk, length + 1, chunk):
            if end // chunk not in missing:
                model.add(group, tokens[:end])
        for end in data.draw(ends):
            model.add(group, tokens[:end])
    if model.plan.state_groups:
        for end in data.draw(ends):
            model.add(STATES, tokens[:end])


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("mix", MIXES)
@settings(max_examples=25)
@given(data=st.data())
def test_the_index_finds_what_is_there_and_nothing_else(
    mix: str, cut: tuple[int, int, int | None], data: st.DataObject
) -> None:
    model = Model(mix, cut)
    texts = data.draw(prompts(min(4 * cut[0], 5000)))
    for tokens in texts:
        fill(model, tokens, data)
    for tokens in texts:
        check(model, tokens, data.draw(st.integers(0, len(tokens))))
    for group, tokens in data.draw(st.permutations(sorted(model.known)))[::2]:
        model.drop(group, tokens)
    for tokens in texts:
        check(model, tokens, data.draw(st.integers(0, len(tokens))))
    for group, tokens in list(model.known):
        model.drop(group, tokens)
    assert not list(model.index) and not any(model.index._ends.values())
    assert not any(model.index._inside.values())
