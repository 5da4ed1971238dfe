"""Where every item is: in the arena, in the host tier, in a file. Looked up by prompt. Pure.

Reads digests of whole chunks in bulk; tails and states, which may end anywhere, are found by the
hash boundary before their end. A prompt that leaves a chunk or tail inside reads what comes before:
each hash boundary inside leads to the item, so all that KV events announce can be loaded.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, compress, takewhile

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.messages import STATES, FileRange, Item, Key, Place
from engine.kv_cache.coverage import Coverage, Longest, longest_joint
from engine.kv_cache.listener import TierListener
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.spec import SlidingWindowSpec
from serving.kv_events.wire import CPU, STORAGE


@dataclass(slots=True, eq=False)
class Entry:
    """One item and all its copies.

    `places`: in the arena. `host`: byte offset in the host tier. `file`: its bytes on disk.
    `token_ids`: its tokens, of states those since the hash boundary before; none where only a file
    is known, which does not tell them. `cache_salt`: that of the prompt that told them.
    """

    item: Item
    places: list[Place] = field(default_factory=list)
    host: int | None = None
    file: FileRange | None = None
    token_ids: "array[int]" = field(default_factory=lambda: array("I"))
    cache_salt: str | None = None

    @property
    def is_gone(self) -> bool:
        return not self.places and self.host is None and self.file is None


class ItemIndex:
    """All items that this node can find anywhere."""

    def __init__(self, chunks: ChunkPlan, tiers: TierListener | None = None) -> None:
        self._chunks = chunks
        self._tiers = tiers
        groups = [*chunks.chunk_tokens, STATES]
        self._entries: dict[int, dict[bytes, Entry]] = {group: {} for group in groups}
        # By the digest of the last hash boundary before their end: end -> digests. Prompts that
        # part after that boundary may end after equally many tokens.
        self._ends: dict[int, dict[bytes, dict[int, set[bytes]]]] = {group: {} for group in groups}
        # By each hash boundary inside an item, its digest: dictionaries as ordered sets.
        self._inside: dict[int, dict[bytes, dict[bytes, None]]] = {group: {} for group in groups}
        self._step = chunks.arena.hash_block_size

    @property
    def num_items(self) -> int:
        """Items that are anywhere, also in the arena alone; from any thread."""
        return sum(map(len, self._entries.values()))

    @property
    def is_heard(self) -> bool:
        """True if somebody is told what comes to a tier and what goes."""
        return self._tiers is not None

    def __iter__(self) -> Iterator[Entry]:
        for entries in self._entries.values():
            yield from list(entries.values())

    def get(self, key: Key) -> Entry | None:
        return self._entries[key.group].get(key.digest)

    def add(self, item: Item) -> Entry:
        """The entry of an item, made if it is new."""
        entry = self._entries[item.group].get(item.digest)
        if entry is None:
            entry = self._entries[item.group][item.digest] = Entry(item)
            if not self._is_chunk(item):
                ends = self._ends[item.group].setdefault(item.parent, {})
                ends.setdefault(item.end, set()).add(item.digest)
            for boundary in item.boundaries[1:]:
                self._inside[item.group].setdefault(boundary, {})[item.digest] = None
        return entry

    def boundaries_before(self, key: Key) -> tuple[bytes, ...]:
        """The hash boundaries of an item that ends at `key`, or short of the next boundary."""
        if (entry := self.get(key)) is not None:
            return entry.item.boundaries
        for named in self._ends[key.group].get(key.digest, {}).values():
            return self._entries[key.group][next(iter(named))].item.boundaries[:-1]
        return ()

    def tokens_before(self, key: Key, num_tokens: int) -> "array[int]":
        """The `num_tokens` tokens of a chunk before the end that `key` says; none if unknown."""
        named = [key.digest, *chain(*self._ends[key.group].get(key.digest, {}).values())]
        entries = (self._entries[key.group].get(digest) for digest in named)
        known = (entry.token_ids[:num_tokens] for entry in entries if entry is not None)
        return next((tokens for tokens in known if len(tokens) == num_tokens), array("I"))

    def put_host(self, entry: Entry, offset: int | None) -> None:
        """The entry is at `offset` of the host tier from now on, or there no longer."""
        was_there, entry.host = entry.host is not None, offset
        self._announce(entry, CPU, was_there=was_there, is_there=offset is not None)

    def put_file(self, entry: Entry, found: FileRange | None) -> None:
        """The entry is in a file from now on, or in none."""
        was_there, entry.file = entry.file is not None, found
        self._announce(entry, STORAGE, was_there=was_there, is_there=found is not None)

    def drop_if_gone(self, entry: Entry) -> None:
        item = entry.item
        if not entry.is_gone or self._entries[item.group].pop(item.digest, None) is None:
            return
        for boundary in item.boundaries[1:]:
            inside = self._inside[item.group]
            del inside[boundary][item.digest]
            if not inside[boundary]:
                del inside[boundary]
        if not self._is_chunk(item):
            ends = self._ends[item.group][item.parent]
            ends[item.end].remove(item.digest)
            if not ends[item.end]:
                del ends[item.end]
            if not ends:
                del self._ends[item.group][item.parent]

    def coverage(self, prefix: PrefixDigests) -> Coverage:
        """The attention and the states of a prompt that are somewhere.

        Full attention needs all tokens before a position, a sliding window those of its window.
        """
        groups: list[Longest] = [
            partial(self._resumable if self._window(group) else self._reach, prefix, group)
            for group in self._chunks.chunk_tokens
        ]
        return Coverage(
            lambda limit: longest_joint(limit, groups),
            lambda limit: max(self.states(prefix, limit), default=0),
        )

    def states(self, prefix: PrefixDigests, limit: int) -> list[int]:
        """The positions of at most `limit` tokens with states somewhere."""
        digests = prefix.boundaries()[: limit // self._step + 1]
        ends = self._ends[STATES]
        return [
            end
            for digest in compress(digests, map(ends.__contains__, digests))
            for end, named in ends[digest].items()
            if end <= limit and prefix.digest_at(end) in named
        ]

    def state(self, prefix: PrefixDigests, num_tokens: int) -> Entry | None:
        """The states after exactly `num_tokens` tokens."""
        return self._entries[STATES].get(prefix.digest_at(num_tokens))

    def first_needed(self, group: int, end: int) -> int:
        """The first token of the first block of one group that is read after `end` tokens.

        Blocks are loaded from their start, so that whoever finds them later may read all of them.
        """
        window, size = self._window(group), self._chunks.arena.block_size_of(group)
        return window.first_needed(end) // size * size if window else 0

    def attention(
        self, prefix: PrefixDigests, group: int, tokens: tuple[int, int]
    ) -> Iterator[Entry]:
        """The items of one group that hold `tokens`, in order; stops before one that is missing."""
        start, end = tokens
        chunk = self._chunks.chunk_tokens[group]
        for index in range(start // chunk, -(-end // chunk)):
            entry = self._covering(prefix, group, index, end=min(end, (index + 1) * chunk))
            if entry is None:
                return
            yield entry

    def _reach(self, prefix: PrefixDigests, group: int, limit: int) -> int:
        """Leading tokens of one group of full attention that are somewhere; at most `limit`."""
        chunk, entries = self._chunks.chunk_tokens[group], self._entries[group]
        stride = chunk // self._step
        whole = prefix.boundaries()[stride::stride]
        found = sum(1 for _ in takewhile(entries.__contains__, whole))
        return min(limit, self._longest_part(prefix, group, found)[0])

    def _resumable(self, prefix: PrefixDigests, group: int, limit: int) -> int:
        """The last position of at most `limit` tokens with its whole window somewhere."""
        chunk = self._chunks.chunk_tokens[group]
        while limit:
            first, gap = self.first_needed(group, limit) // chunk, None
            for index in range((limit - 1) // chunk, first - 1, -1):
                end = min(limit, (index + 1) * chunk)
                if self._covering(prefix, group, index, end=end) is None:
                    gap, _ = self._longest_part(prefix, group, index)
                    break
            if gap is None:
                return limit
            limit = gap
        return 0

    def _covering(self, prefix: PrefixDigests, group: int, index: int, *, end: int) -> Entry | None:
        """The chunk at `index`, or an item of it that holds the prompt's tokens up to `end`."""
        chunk = self._chunks.chunk_tokens[group]
        if (stop := (index + 1) * chunk) <= prefix.num_tokens:
            entry = self._entries[group].get(prefix.digest_at(stop))
            if entry is not None:
                return entry
        reach, part = self._longest_part(prefix, group, index)
        return part if reach >= end else None

    def _longest_part(
        self, prefix: PrefixDigests, group: int, index: int
    ) -> tuple[int, Entry | None]:
        """How far the prompt can go in the chunk at `index` without all of it, and by which item.

        tokens     64        80        96        112       128
        item        |=========|=========|=========|=========|
        prompt      |===================|=====              parts from the item after 101
        reach                           ^                   the last hash boundary before that
        """
        chunk, inside = self._chunks.chunk_tokens[group], self._inside[group]
        tail = self._longest_tail(prefix, group, index)
        reach = index * chunk if tail is None else tail.item.end
        if inside:
            start, stop = reach // self._step + 1, (index + 1) * chunk // self._step
            boundaries = prefix.boundaries()[start:stop]
            for at, digest in reversed(list(enumerate(boundaries, start))):
                if named := inside.get(digest):
                    return at * self._step, self._entries[group][next(iter(named))]
        return reach, tail

    def _longest_tail(self, prefix: PrefixDigests, group: int, index: int) -> Entry | None:
        """The longest tail of the chunk at `index` that is a prefix of the prompt."""
        ends = self._ends[group]
        if not ends:
            return None
        stride = self._chunks.chunk_tokens[group] // self._step
        inside = prefix.boundaries()[index * stride : (index + 1) * stride]
        for digest in reversed(inside):
            for end in sorted(ends.get(digest, ()), reverse=True):
                if end > prefix.num_tokens:
                    continue
                if (named := prefix.digest_at(end)) in ends[digest][end]:
                    return self._entries[group][named]
        return None

    def _announce(self, entry: Entry, tier: str, *, was_there: bool, is_there: bool) -> None:
        if self._tiers is None or was_there == is_there:
            return
        cached, parent = self._chunks.cached(entry.item)
        if is_there:
            tokens = tuple(entry.token_ids)
            salt = entry.cache_salt
            self._tiers.stored_in(tier, cached, parent=parent, token_ids=tokens, cache_salt=salt)
        else:
            self._tiers.removed_from(tier, cached)

    def _is_chunk(self, item: Item) -> bool:
        return item.group != STATES and item.end % self._chunks.chunk_tokens[item.group] == 0

    def _window(self, group: int) -> SlidingWindowSpec | None:
        spec = self._chunks.arena.groups[group].spec
        return spec if isinstance(spec, SlidingWindowSpec) else None
