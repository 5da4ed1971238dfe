"""Block hashes of one engine of another project, translated to digests that a prompt has as well.

Such hashes cannot be computed by anybody else (random seeds, adapters, lookahead), but each is told
with its tokens and the hash before it, which is enough to give every one a digest of ours:

    hash           parent   tokens          digest
    h1             None     t0 .. t15       d1 = chained(ROOT, t0 .. t15)
    h2             h1       t16 .. t31      d2 = chained(d1, t16 .. t31)
    h2, of Mamba   None     t0 .. t31       d2: an equal hash ends where the other one does

A block that several groups or tiers hold has one hash in all of them. Two requests that compute the
same block at once make two copies, each announced and removed; but some engines announce a block
again that is only reused, and remove it once. So what is left after a removal counts, for a while.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from engine.errors import KVEventError
from engine.kv_cache.prefix import TOKEN_BYTES
from proxy.routing.block_table import SLICE
from proxy.routing.chained_digests import ROOT, chained, token_bytes
from proxy.routing.engine_groups import EngineGroups
from proxy.routing.layout_index import MAMBA, START
from proxy.routing.prefix_index import MAX_ENTRIES, PrefixIndex
from proxy.routing.waiting_blocks import Later, WaitingBlocks
from serving.kv_events.wire import (
    CPU,
    FULL_ATTENTION,
    GPU,
    STORAGE,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EngineStored,
    Event,
)
from serving.rpc.messages import KVEventsInfo

DOUBT_S: Final = 60.0
"""How long that counts which may be gone: what was known before events were lost, and the copies
that should be left of a block after one was removed."""
TIER_OF: Final = {
    GPU: GPU,
    CPU: CPU,
    STORAGE: STORAGE,
    "CPU_PINNED": CPU,
    "DISK": STORAGE,
    "EXTERNAL": STORAGE,
}
"""SGLang's names of the tiers, and vLLM's."""
MAX_TABLES: Final = 256
MAX_DOUBTS: Final = 1000
MAX_WIDTH: Final = 1024
"""Our blocks in one of the engine's."""
SLICES_PER_TICK: Final = 16


class _Place(msgspec.Struct, gc=False):
    """The prefix that a hash names, and how many tables have the hash.

    `names`: our digests of the last hash blocks of the prefix; of a tail, which ends `tail` tokens
    after `boundary`, its own one. `parent`: the hash before it.
    """

    names: tuple[bytes, ...]
    parent: BlockHash | None
    tail: int = 0
    boundary: bytes = START
    num_holders: int = 0


class _Where(NamedTuple):
    """A group in a tier. `width`: our blocks in one of the engine's; 0 for tails."""

    group: int
    tier: str
    width: int


_Copy = tuple[_Where, BlockHash]


class EngineHashes:
    """The `EventSink` of one engine, between its follower and the index.

    Belongs to the thread of the events. A block that cannot be placed is never promised;
    `num_unplaced` counts them. No event raises, and memory is bounded whatever comes.
    """

    def __init__(self, index: PrefixIndex, info: KVEventsInfo) -> None:
        """`index` knows the node already, by `info`."""
        self.num_unplaced = 0
        self._index = index
        self._info = info
        self._size = info.hash_block_size
        self._groups = EngineGroups(info.groups)
        self._places: dict[BlockHash, _Place] = {}
        # The hashes at each place of the cache, with the epoch in which each was heard last.
        self._tables: dict[_Where, dict[BlockHash, int]] = {}
        self._num_held = self._num_names = 0
        self._copies: dict[_Copy, int] = {}  # beyond the first
        self._unsure: OrderedDict[_Copy, float] = OrderedDict()  # when each ends, the first first
        self._now = 0.0
        self._waiting = WaitingBlocks(self._drop)
        self._epoch = 0  # one more after each loss
        self._is_sure = False  # something was heard in this epoch
        self._doubts: deque[tuple[float, int]] = deque()  # when the entries of an epoch end
        self._sweep: Iterator[None] = iter(())

    @property
    def num_held(self) -> int:
        """Hashes in all groups and tiers."""
        return self._num_held

    def apply(self, name: str, events: Sequence[Event]) -> None:
        """Changes of the engine's cache, in order; groups may come in any order within a step."""
        self._learn(name, events)
        for event in events:
            if isinstance(event, BlockStored):
                self._store_all(name, event)
            elif isinstance(event, BlockRemoved):
                self._remove(name, event)
            else:
                self._empty()
                self._index.clear(name)

    def clear(self, name: str) -> None:
        """Nothing is known of the engine any more, not even its groups."""
        self._empty()
        self._groups = EngineGroups(self._info.groups)
        self._index.set_node(name, self._info)
        self._index.clear(name)

    def doubt(self, name: str, now: float) -> None:
        """Ends in `DOUBT_S` all that is not confirmed until then; a second doubt renews none.

        Confirmed is what is stored again, and what comes before something stored in a group that
        keeps whole prefixes.
        """
        self._waiting.clear()
        if not self._is_sure:
            return
        # Too many losses at once: the last ones end early, with one before them.
        ends_at = now + DOUBT_S if len(self._doubts) < MAX_DOUBTS else self._doubts.pop()[0]
        self._doubts.append((ends_at, self._epoch))
        self._epoch += 1
        self._is_sure = False

    def tick(self, name: str, now: float) -> None:
        """Ends what was doubted long enough, a bounded part of it in each call."""
        self._now = now
        for _ in range(SLICES_PER_TICK * SLICE):
            where, each = next(iter(self._unsure), (None, b""))
            if where is None or self._unsure[where, each] > now:
                break
            self._take_out(name, where, (each,), for_good=True)
        for _ in range(SLICES_PER_TICK):
            if next(self._sweep, self) is not self:
                continue
            if not self._doubts or self._doubts[0][0] > now:
                return
            self._sweep = self._forget_until(name, self._doubts.popleft()[1])

    # --- groups ------------------------------------------------------------------------------

    def _learn(self, name: str, events: Iterable[Event]) -> None:
        """Kinds of groups come with their blocks; under another layout all is told again."""
        first, learn = self._groups.of(0), self._groups.learn
        if not any([learn(event) for event in events if isinstance(event, BlockStored)]):
            return
        if self._groups.of(0) != first:  # its blocks were taken for what they are not
            for where in [where for where in self._tables if where.group == 0]:
                self._take_out(name, where, list(self._tables[where]), for_good=True)
                del self._tables[where]
        self._index.set_node(name, replace(self._info, groups=self._groups.layout))
        for where, table in self._tables.items():
            every = list(table)
            for start in range(0, len(every), SLICE):
                places = [self._places[each] for each in every[start : start + SLICE]]
                self._tell(name, where, places)

    def _is_state(self, group: int) -> bool:
        known = self._groups.of(group)
        return known is not None and known.kind == MAMBA

    # --- blocks that come --------------------------------------------------------------------

    def _store_all(self, name: str, event: BlockStored) -> None:
        """Place an event's blocks, and those that waited for them."""
        todo = deque([self._waiting.later(event)])
        while todo:
            for placed in self._store(name, todo.popleft()):
                todo.extend(self._waiting.take(placed))

    def _store(self, name: str, later: Later) -> list[BlockHash]:
        """The hashes that have a place now and had none before."""
        event, tier = later.event, TIER_OF.get(later.event.medium or GPU)
        is_odd = not 0 <= event.block_size <= MAX_WIDTH * self._size
        if tier is None or is_odd or not self._groups.fits(event):
            self._drop(len(event.block_hashes))
            return []
        num_tokens = len(event.token_ids)
        is_whole = num_tokens and num_tokens == len(event.block_hashes) * event.block_size
        placed = self._by_parent(later) if is_whole else self._by_hash(later)
        is_state, news = self._is_state(event.group_idx or 0), []
        told: dict[_Where, list[_Place]] = {}
        for block_hash, place in placed:
            width = 1 if is_state else max(1, event.block_size // self._size)
            width = 0 if place.tail else min(width, len(place.names))
            where = _Where(event.group_idx or 0, tier, width)
            if self._waiting.is_gone(later, tier, block_hash):
                continue
            is_new = not place.num_holders
            if self._hold(where, block_hash, place):
                told.setdefault(where, []).append(place)
                news += [block_hash] if is_new else []
        for where, places in told.items():
            self._tell(name, where, places)
        self._confirm_before(event, tier)
        return news

    def _by_hash(self, later: Later) -> list[tuple[BlockHash, _Place]]:
        """The blocks of a group that keeps few of many, or a tier that knows no tokens.

        They end where equal hashes of other groups or tiers do, or will.
        """
        placed = []
        for each in later.event.block_hashes:
            if (place := self._places.get(each)) is not None:
                placed.append((each, place))
            else:
                alone = replace(later.event, block_hashes=(each,), token_ids=())
                self._waiting.add(each, later._replace(event=alone))
        return placed

    def _by_parent(self, later: Later) -> list[tuple[BlockHash, _Place]]:
        """The blocks of an event with the tokens of all of them, each after the one before it."""
        event, hashes = later.event, later.event.block_hashes
        try:
            keys = event.keys() if isinstance(event, EngineStored) else [b""] * len(hashes)
            tokens = token_bytes(event.token_ids)
        except (KVEventError, OverflowError):
            self._drop(len(hashes))
            return []
        placed, parent, length = [], event.parent_block_hash, event.block_size * TOKEN_BYTES
        before = None if parent is None else self._places.get(parent)
        for number, (each, key) in enumerate(zip(hashes, keys, strict=True)):
            place = self._places.get(each)
            if parent is not None and before is None and place is None:
                self._waiting.add(parent, later)  # as a whole: it is the first of them
                break
            is_short = place is None or len(place.names) < event.block_size // self._size
            if is_short and (parent is None or (before is not None and not before.tail)):
                end = ROOT if before is None else before.names[-1]
                block = tokens[number * length : (number + 1) * length]
                place = self._known_or_new(place, self._after(end, block, keys=key, parent=parent))
            if place is None:  # nothing follows a tail
                self._drop(len(hashes) - number)
                break
            placed.append((each, place))
            parent, before = each, place
        return placed

    def _after(
        self, before: bytes, tokens: bytes, *, keys: bytes, parent: BlockHash | None
    ) -> _Place:
        """The place of a block after `before`, of whole hash blocks or with a tail."""
        names, length = [], self._size * TOKEN_BYTES
        whole = len(tokens) // length * length
        for start in range(0, whole, length):
            before = chained(before, tokens[start : start + length], keys)
            names.append(before)
            keys = b""
        if whole == len(tokens):
            return _Place(tuple(names), parent)
        boundary = START if parent is None and not names else before
        rest = tokens[whole:]
        name = chained(before, rest, keys)
        return _Place((name,), parent, tail=len(rest) // TOKEN_BYTES, boundary=boundary)

    def _known_or_new(self, known: _Place | None, new: _Place) -> _Place:
        """An equal hash is the same prefix; a larger block that ends there has more names."""
        if known is None:
            return new
        num_more = len(new.names) - len(known.names)
        is_same = known.names[-1] == new.names[-1]
        if num_more > 0 and is_same and self._num_names + num_more <= MAX_ENTRIES:
            known.names = new.names
            self._num_names += num_more
        return known

    def _hold(self, where: _Where, block_hash: BlockHash, place: _Place) -> bool:
        """True if the hash was not there; False as well if there is no room for it."""
        table = self._tables.get(where)
        if table is not None and block_hash in table:
            table[block_hash], self._is_sure = self._epoch, True
            copy = (where, block_hash)
            self._copies[copy] = self._copies.get(copy, 0) + 1
            self._unsure.pop(copy, None)
            return False
        num_names = self._num_names + (0 if place.num_holders else len(place.names))
        is_full = self._num_held >= MAX_ENTRIES or num_names > MAX_ENTRIES
        if is_full or (table is None and len(self._tables) >= MAX_TABLES):
            self._drop(1)
            return False
        self._tables.setdefault(where, {})[block_hash] = self._epoch
        self._places[block_hash], self._num_names = place, num_names
        place.num_holders += 1
        self._num_held += 1
        self._is_sure = True
        return True

    def _confirm_before(self, event: BlockStored, tier: str) -> None:
        """Who stores a block has all those before it, where whole prefixes are kept."""
        group = self._groups.of(event.group_idx or 0)
        if not self._epoch or tier != GPU or group is None or group.kind != FULL_ATTENTION:
            return
        width = max(1, event.block_size // self._size)
        table = self._tables.get(_Where(event.group_idx or 0, tier, width), {})
        each = event.parent_block_hash
        while each is not None and table.get(each, self._epoch) < self._epoch:
            table[each] = self._epoch
            each = self._places[each].parent

    # --- blocks that go ----------------------------------------------------------------------

    def _remove(self, name: str, event: BlockRemoved) -> None:
        group, tier = event.group_idx or 0, TIER_OF.get(event.medium or GPU)
        if tier is None:
            return
        self._waiting.remove(group, tier, event.block_hashes)
        for where in [it for it in self._tables if (it.group, it.tier) == (group, tier)]:
            self._take_out(name, where, event.block_hashes)

    def _forget_until(self, name: str, epoch: int) -> Iterator[None]:
        """Takes out what was heard last in `epoch` or before, one slice after each `next`."""
        for where, table in list(self._tables.items()):
            every = list(table)
            for start in range(0, len(every), SLICE):
                part = every[start : start + SLICE]
                ended = [each for each in part if table.get(each, inf) <= epoch]
                self._take_out(name, where, ended, for_good=True)
                yield

    def _take_out(
        self, name: str, where: _Where, hashes: Iterable[BlockHash], *, for_good: bool = False
    ) -> None:
        """One copy of each is gone, or all of them."""
        table = self._tables.get(where, {})
        gone: list[bytes] = []
        for each in hashes:
            if each not in table:
                continue
            copy = (where, each)
            num_more = self._copies.pop(copy, 0)
            if num_more > 1 and not for_good:
                self._copies[copy] = num_more - 1
            self._unsure.pop(copy, None)
            if num_more and not for_good:
                self._unsure[copy] = self._now + DOUBT_S
                continue
            del table[each]
            gone += _names(where, self._release(each))
        if gone and (where.width or self._is_state(where.group)):
            self._index.apply(name, (BlockRemoved(tuple(gone), where.tier, where.group),))

    def _release(self, block_hash: BlockHash) -> _Place:
        """One table less has a hash; the last one takes its place along."""
        place = self._places[block_hash]
        place.num_holders -= 1
        self._num_held -= 1
        if not place.num_holders:
            del self._places[block_hash]
            self._num_names -= len(place.names)
        return place

    def _empty(self) -> None:
        for known in (self._places, self._tables, self._copies, self._unsure):
            known.clear()
        self._num_held = self._num_names = 0
        self._waiting.clear()
        self._doubts.clear()
        self._is_sure = False
        self._sweep = iter(())

    def _drop(self, num_blocks: int) -> None:
        self.num_unplaced += num_blocks

    # --- the index ---------------------------------------------------------------------------

    def _tell(self, name: str, where: _Where, places: Iterable[_Place]) -> None:
        """Store blocks in the index. It has tails of checkpoints only."""
        if where.width:
            names = tuple(each for place in places for each in _names(where, place))
            self._index.apply(name, (_stored(names, None, self._size, where=where),))
        elif self._is_state(where.group):
            tails = [_stored(it.names, it.boundary, it.tail, where=where) for it in places]
            self._index.apply(name, tails)


def _names(where: _Where, place: _Place) -> tuple[bytes, ...]:
    return place.names[-where.width :] if where.width else place.names


def _stored(
    names: tuple[bytes, ...], boundary: bytes | None, length: int, *, where: _Where
) -> BlockStored:
    parent = boundary or None
    return BlockStored(names, parent, (), length, medium=where.tier, group_idx=where.group)
