"""Which items are written to the disk tier, and when: early, on the way down, or at the end. Pure.

Items are only ever written in batches, one file each; few files are under way at once.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

from connector.offload.chunk_plan import ChunkPlan
from connector.offload.index import Entry, ItemIndex
from connector.offload.messages import STATES, FileWrite, Item, Key, Place
from engine.step import BlockSave

MAX_WRITES = 2
"""Files that are being written at once; the disk is one."""
FILE_BYTES = 8 << 20
"""Most bytes of one file: large enough for a disk, small enough to be evicted as a whole."""
MAX_EARLY = 65_536


class FileWrites:
    """Owner of the writes under way, and of the queue of early ones. `disk_bytes` 0: no disk."""

    def __init__(self, chunks: ChunkPlan, index: ItemIndex, disk_bytes: int) -> None:
        self.is_writable = disk_bytes > 0
        self._chunks = chunks
        self._index = index
        self._file_bytes = min(FILE_BYTES, disk_bytes // 8)
        self._early: OrderedDict[Key, None] = OrderedDict()
        self._units: dict[int, int | None] = {}  # by write: the unit of the host tier that leaves
        self._last_id = 0

    @property
    def has_room(self) -> bool:
        return self.is_writable and len(self._units) < MAX_WRITES

    @property
    def is_idle(self) -> bool:
        """True if nothing is being written or about to be."""
        return not self._units and not (self._early and self.is_writable)

    def add_early(self, entries: Iterable[Entry]) -> bool:
        """These are worth more on disk than in the arena alone; True if any is to be written."""
        for entry in entries:
            if entry.places and entry.file is None:
                self._early[entry.item.key] = None
        while len(self._early) > MAX_EARLY:
            self._early.popitem(last=False)
        return bool(self._early)

    def early(self) -> Iterator[FileWrite]:
        """Writes from the arena, whose blocks must stay until they have been read there."""
        while self._early and self.has_room:
            entries: list[Entry] = []
            nbytes = 0
            while self._early and nbytes < self._file_bytes:
                entry = self._index.get(self._early.popitem(last=False)[0])
                if entry is not None and entry.places and entry.file is None:
                    entries.append(entry)
                    nbytes += self._chunks.nbytes(entry.item)
            if entries:
                places = tuple(entry.places[0] for entry in entries)
                yield self._write([entry.item for entry in entries], places, saves=True)

    def of_unit(self, unit: int, items: Sequence[Item], offsets: tuple[int, ...]) -> FileWrite:
        """The write of the items of one unit of the host tier, which is to be free after it."""
        write = self._write(items, offsets)
        self._units[write.write_id] = unit
        return write

    def ended(self, write_id: int) -> int | None:
        """The unit of the host tier that this write was for, if it was for one."""
        return self._units.pop(write_id)

    def last(self) -> Iterator[FileWrite]:
        """Writes of all that is not on disk, the newest first; after the last step."""
        batch: list[Entry] = []
        nbytes = 0
        dirty = [it for it in self._index if it.file is None and (it.places or it.host is not None)]
        for entry in reversed(dirty if self.is_writable else []):
            batch.append(entry)
            nbytes += self._chunks.nbytes(entry.item)
            if nbytes >= self._file_bytes or entry is dirty[0]:
                sources = tuple(it.places[0] if it.places else it.host or 0 for it in batch)
                yield self._write([it.item for it in batch], sources)
                batch, nbytes = [], 0

    def save_of(self, write: FileWrite) -> BlockSave:
        """The blocks and states that stay in the arena for a write from there."""
        blocks: dict[int, list[int]] = {}
        for item, place in zip(write.items, write.sources, strict=True):
            assert isinstance(place, Place)
            groups = self._chunks.arena.state_groups if item.group == STATES else (item.group,)
            for group, block in zip(groups, place.blocks, strict=True):
                blocks.setdefault(group, []).append(block)
        return BlockSave(write.save_id or "", blocks)

    def _write(
        self, items: Sequence[Item], sources: tuple[Place | int, ...], *, saves: bool = False
    ) -> FileWrite:
        self._last_id += 1
        self._units[self._last_id] = None
        save_id = str(self._last_id) if saves else None
        return FileWrite(self._last_id, tuple(items), sources, save_id)
