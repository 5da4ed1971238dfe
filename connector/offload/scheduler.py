"""The scheduler side of the OffloadConnector: what is in a tier, what goes there, what comes back.

Decides and never waits; the bytes are the worker side's. Torch-free.
"""

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.config import OffloadConfig
from connector.offload.file_writes import FileWrites
from connector.offload.host_slots import HostSlots
from connector.offload.index import Entry, ItemIndex
from connector.offload.messages import (
    STATES,
    FileItems,
    FileRange,
    FileWrite,
    HostCopy,
    Item,
    Key,
    LoadPart,
    Orders,
    Place,
    Report,
    TierLoad,
    WriteDone,
)
from connector.offload.metrics import OffloadStats
from engine.kv_cache.coverage import longest_joint
from engine.kv_cache.listener import Cached, CachedBlocks, CachedStates, TierListener
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_connector import FinishDecision, Match, SchedulerConnector
from engine.request import Request
from engine.step import BlockLoad, ConnectorMeta, ConnectorOutput, ScheduledRequest
from engine.types import TokenId

MAX_LOADS = 32
"""Loads under way; while there are so many, prompts are computed."""
SPARE_SHARE = 8
"""One in so many units of the host tier is kept free by writing others to disk ahead of need."""


@dataclass(slots=True, frozen=True)
class _Loading:
    """A load whose thread has not ended: its items, and the host tier's slots that it may read."""

    request_id: str
    keys: list[Key]
    slots: set[int]


class OffloadScheduler(SchedulerConnector):
    """One node's tiers. `slots`: those of the host tier; without one, a staging for the disk's.

        arena --evicts--> host tier --evicts--> disk      exclusive: an item goes down as the tier
          ^  ^--------------'                     |        above drops it, and leaves the host tier
          '---------------------------------------'        when it is loaded

    Early, before the arena drops them, states with their attention and prefixes that were found
    again are written to disk: they survive a crash.
    """

    def __init__(
        self,
        chunks: ChunkPlan,
        slots: HostSlots,
        config: OffloadConfig,
        *,
        stats: OffloadStats,
        tiers: TierListener | None,
        wake: Callable[[], None],
    ) -> None:
        self.cache_listener = self  # it knows what the arena can find
        self.index = ItemIndex(chunks, tiers)
        self.slots = slots
        self.writes = FileWrites(chunks, self.index, config.disk_bytes)
        self._chunks = chunks
        self._config = config
        self._stats = stats
        self._wake = wake
        self._victims: list[tuple[Item, Place]] = []
        self._new_loads: list[tuple[int, list[tuple[Entry, Place]]]] = []
        self._loads: dict[int, _Loading] = {}
        self._loading: set[Key] = set()
        self._load_of: dict[str, int] = {}  # by request, until its end is reported
        self._files: dict[str, list[Key]] = {}
        self._numbers = 0

    # --- the cache's listener ----------------------------------------------------------------

    def stored(
        self,
        cached: Cached,
        parent: bytes,
        token_ids: tuple[TokenId, ...],
        *,
        cache_salt: str | None,
    ) -> None:
        """The arena can find more."""
        preceding = self._chunks.preceding(cached, parent)
        entry = None if preceding is None else self.index.get(preceding)
        before = () if preceding is None else self.index.boundaries_before(preceding)
        placed = list(self._chunks.items_of(cached, parent, before))
        # Nobody else wants to know tokens.
        told = token_ids if self.index.is_heard else ()
        first, tokens = self._tokens(cached, preceding, told)
        if entry is not None and isinstance(cached, CachedBlocks) and cached.digests:
            place = placed[0][1] if placed else None
            if place in entry.places:
                entry.places.remove(place)
                self.index.drop_if_gone(entry)
        for item, place in placed:
            entry = self.index.add(item)
            entry.places.append(place)
            if not entry.token_ids and item.start >= first:
                # States belong to a position; their tokens are those before it.
                own = slice(item.start - first, item.end - first)
                entry.token_ids = tokens if item.group == STATES else tokens[own]
                entry.cache_salt = cache_salt
            if entry.host is not None:  # exclusive: the arena has it again
                self.slots.free(entry.host)
                self.index.put_host(entry, None)

    def removed(self, cached: Cached) -> None:
        """The arena can find less; what it held only once goes down a tier with this step."""
        for item, place in self._chunks.items_of(cached, b""):
            entry = self.index.get(item.key)
            if entry is None or place not in entry.places:
                continue
            entry.places.remove(place)
            if not entry.places:
                self._victims.append((entry.item, place))

    # --- loads -------------------------------------------------------------------------------

    def match(self, request: Request, num_local_tokens: int) -> Match | None:
        """The attention and the states that arena and tiers have together, if a tier adds to them.

        Attention may reach further than the last states: another connector may bring those (see
        `connector.multi.scheduler`). Pending while another request loads what this one would start
        from: then it will be in the arena. Nothing while a load that ran out of time still hangs:
        this one would wait as long.
        """
        if len(self._loads) >= MAX_LOADS or len(self._loads) > len(self._load_of):
            return None
        prefix = request.prefix
        coverage = self.index.coverage(prefix)
        reach = coverage.attention(request.num_tokens - 1)
        if reach <= num_local_tokens:
            return None
        has_states = bool(self._chunks.arena.state_groups)
        both = [coverage.attention, coverage.states]
        start = longest_joint(reach, both) if has_states else reach
        needed = self._attention(prefix, num_local_tokens, reach)
        if start > num_local_tokens:
            states = self.index.state(prefix, start) if has_states else None
            needed += [states] if states else []
            awaited = {entry.item.key for entry in needed if entry.item.end <= start}
            if not awaited.isdisjoint(self._loading):
                return Match(is_pending=True)
        if all(entry.places for entry in needed):
            return None
        return Match(coverage, self._config.load_weight)

    def start_load(self, request: Request, load: BlockLoad | None) -> int:
        """Queues `load`, and pins what it reads of the host tier."""
        self._stats.queries += 1
        if load is None:
            return 0
        self._stats.hits += 1
        targets = list(self._targets(request, load))
        pinned = {entry.host for entry, _ in targets if entry.host is not None}
        for offset in pinned:
            self.slots.pin(offset)
        self._numbers += 1
        keys = [entry.item.key for entry, _ in targets]
        self._loads[self._numbers] = _Loading(request.request_id, keys, pinned)
        self._loading.update(keys)
        self._load_of[request.request_id] = self._numbers
        self._new_loads.append((self._numbers, targets))
        return 1

    def build_meta(self, scheduled: Sequence[ScheduledRequest]) -> ConnectorMeta:
        """Victims go to the host tier, old items of it and early ones to disk; loads begin."""
        copies = tuple(self._keep_victims())
        writes = [*self._demotions(), *self.writes.early()]
        loads, self._new_loads = self._new_loads, []
        if not (copies or writes or loads):
            return ConnectorMeta()
        # After the victims are in the host tier: some of them may be about to be loaded.
        orders = tuple(self._order(number, targets) for number, targets in loads)
        saves = (self.writes.save_of(write) for write in writes if write.save_id is not None)
        return ConnectorMeta(Orders(copies, tuple(writes), orders), tuple(saves))

    def update(self, output: ConnectorOutput) -> None:
        """Learns what the worker side has finished, found and lost."""
        for request_id in (*output.loaded, *(failed.request_id for failed in output.failed)):
            # A load that failed in several groups is reported once for each.
            if (number := self._load_of.pop(request_id, None)) is not None:
                self._loading.difference_update(self._loads[number].keys)
        report = output.message
        if report is None:
            return
        assert isinstance(report, Report)
        self.writes.is_writable = report.is_writable and self._config.disk_bytes > 0
        for number in report.ended:
            for offset in self._loads.pop(number).slots:
                self.slots.unpin(offset)
        for done in report.written:
            self._written(done)
        for file in report.found:
            self._found(file)
        for name in report.gone:
            self._lost(name, self._files.pop(name, ()))
        for name, item in report.bad:
            self._lost(name, (item.key,))

    def forget_evicted(self) -> None:
        """The arena is emptied: what it had alone does not go down a tier."""
        victims, self._victims = self._victims, []
        for item, _ in victims:
            if (entry := self.index.get(item.key)) is not None:
                self.index.drop_if_gone(entry)

    def request_finished(self, request: Request) -> FinishDecision:
        """Its states with their attention, or a prefix that was found, are written early."""
        prefix, states = request.prefix, self._chunks.arena.state_groups
        if not self._config.disk_bytes:
            return FinishDecision()
        positions = self.index.states(prefix, request.num_computed_tokens) if states else []
        end = max(positions, default=0) if states else request.num_cached_tokens
        entries = [entry for at in positions if (entry := self.index.state(prefix, at))]
        if self.writes.add_early([*entries, *self._attention(prefix, 0, end)]):
            self._wake()  # an idle engine would not ask for the next message
        return FinishDecision()

    def _tokens(
        self, cached: Cached, preceding: Key | None, token_ids: tuple[TokenId, ...]
    ) -> "tuple[int, array[int]]":
        """Known tokens of items in `cached`, and the position of the first one."""
        if isinstance(cached, CachedStates):
            return cached.end, array("I", token_ids)
        if preceding is None:
            return cached.start, array("I", token_ids)
        num_before = cached.start % self._chunks.chunk_tokens[cached.group]
        before = self.index.tokens_before(preceding, num_before)
        return cached.start - len(before), before + array("I", token_ids)

    # --- parts of a load ---------------------------------------------------------------------

    def _order(self, number: int, targets: Sequence[tuple[Entry, Place]]) -> TierLoad:
        """Says where each item is now, and pins what this step has put into the host tier."""
        load = self._loads[number]
        parts = tuple(LoadPart(entry.item, place, _source(entry)) for entry, place in targets)
        late = {part.source for part in parts if isinstance(part.source, int)} - load.slots
        for offset in late:
            self.slots.pin(offset)
        load.slots.update(late)
        return TierLoad(number, load.request_id, parts)

    def _targets(self, request: Request, load: BlockLoad) -> Iterator[tuple[Entry, Place]]:
        """The items of a load, and where they go. Those of one group are in token order."""
        arena = self._chunks.arena
        for group, (start, end) in enumerate(load.ranges):
            if start >= end or group in arena.state_groups:
                continue
            size = arena.block_size_of(group)
            start = max(start, self.index.first_needed(group, load.num_tokens))
            for entry in self.index.attention(request.prefix, group, (start, end)):
                block, first = divmod(entry.item.start, size)
                yield entry, Place((load.tables[group][block],), first)
                start = entry.item.end
            assert start >= end, "attention was offered and is gone within one step"
        if any(load.ranges[group][0] < load.ranges[group][1] for group in arena.state_groups):
            states = self.index.state(request.prefix, load.num_tokens)
            assert states is not None, "states were offered and are gone within one step"
            yield states, Place(tuple(load.tables[group][0] for group in arena.state_groups))

    def _attention(self, prefix: PrefixDigests, start: int, end: int) -> list[Entry]:
        """The entries that a load of the attention of tokens `start` to `end` would read."""
        entries: list[Entry] = []
        for group in self._chunks.chunk_tokens:
            first = max(start, self.index.first_needed(group, end))
            entries += self.index.attention(prefix, group, (first, end))
        return entries

    # --- the host tier -----------------------------------------------------------------------

    def _keep_victims(self) -> Iterator[HostCopy]:
        victims, self._victims = self._victims, []
        for item, place in victims:
            # Its file may have been lost since, and with it the entry.
            entry = self.index.add(item)
            if entry.places or entry.host is not None:
                continue  # stored again, or kept by another eviction of the same step
            if entry.file is None or self._config.host_bytes:
                self.index.put_host(entry, self._slot(entry.item.key))
                if entry.host is not None:
                    yield HostCopy(entry.item, place, entry.host)
                elif entry.file is None:
                    self._stats.dropped["backpressure"] += 1
            self.index.drop_if_gone(entry)

    def _slot(self, key: Key) -> int | None:
        offset = self.slots.insert(key)
        while offset is None and (least := self.slots.least_recent()) is not None:
            unit, keys = least
            if self.writes.is_writable and any(self._is_dirty(key) for key in keys.values()):
                return None  # it is written to disk first
            self._evict(unit)
            offset = self.slots.insert(key)
        return offset

    def _demotions(self) -> Iterator[FileWrite]:
        """Writes the least recent units, so that some are always free for what a step evicts."""
        spare = max(1, self.slots.num_units // SPARE_SHARE)
        while self.writes.has_room and self.slots.num_free_units < spare:
            if (least := self.slots.least_recent()) is None:
                return
            unit, keys = least
            dirty = [(offset, key) for offset, key in keys.items() if self._is_dirty(key)]
            if not dirty:
                self._evict(unit)
                continue
            self.slots.leave(unit)
            entries = [self.index.get(key) for _, key in dirty]
            items = [entry.item for entry in entries if entry is not None]
            yield self.writes.of_unit(unit, items, tuple(offset for offset, _ in dirty))

    def _evict(self, unit: int) -> None:
        for key in self.slots.drop(unit).values():
            if (entry := self.index.get(key)) is not None:
                self.index.put_host(entry, None)
                self._stats.dropped["evicted"] += entry.is_gone
                self.index.drop_if_gone(entry)

    def _is_dirty(self, key: Key) -> bool:
        entry = self.index.get(key)
        return entry is not None and entry.file is None

    # --- the disk tier -----------------------------------------------------------------------

    def _written(self, done: WriteDone) -> None:
        unit = self.writes.ended(done.write_id)
        if done.file is not None:
            self._found(done.file)
        if unit is None:
            return
        if done.file is None or self.slots.is_read(unit):
            self.slots.stay(unit)
        else:
            self._evict(unit)

    def _found(self, file: FileItems) -> None:
        keys = self._files.setdefault(file.name, [])
        for item, found in zip(file.items, file.ranges, strict=True):
            entry = self.index.add(item)
            if entry.file is None:
                self.index.put_file(entry, found)
                keys.append(item.key)

    def _lost(self, name: str, keys: Iterable[Key]) -> None:
        """These items are no longer in file `name`."""
        for key in keys:
            entry = self.index.get(key)
            if entry is not None and entry.file is not None and entry.file.name == name:
                self.index.put_file(entry, None)
                self.index.drop_if_gone(entry)


def _source(entry: Entry) -> int | FileRange | Place | None:
    """The nearest copy; None if its last one was evicted in this very step and found no room."""
    if entry.places:
        return entry.places[0]
    return entry.file if entry.host is None else entry.host
