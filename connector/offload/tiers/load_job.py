"""One load from the tiers, run by a reader thread: read, verify, copy to the arena."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from connector.offload.messages import STATES, FileRange, Item, LoadPart, TierLoad
from connector.offload.tiers.arena_items import ArenaItems
from connector.offload.tiers.folder import Folder
from connector.offload.tiers.tier_file import TierFileError, check
from engine.arena import ArenaMemory
from engine.step import LoadFailure

AHEAD = 8
"""Reads announced to the kernel in advance, so that the disk works while bytes are hashed."""
READ_BYTES = 2 << 20
"""Most bytes of one read: they are hashed and copied while they are in the processor's cache."""


@dataclass(slots=True, eq=False)
class LoadJob:
    """A load under way. `deadline`: monotonic seconds.

    `lock` guards `is_over`: after it is set nothing is written to the arena, whose blocks may be
    somebody else's. `failed`: by group, the cause and the first token that is bad.
    """

    load: TierLoad
    deadline: float
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    failed: dict[int, tuple[str, int]] = field(default_factory=dict)
    done: set[LoadPart] = field(default_factory=set)
    bad: list[tuple[str, Item]] = field(default_factory=list)
    nbytes: dict[str, int] = field(default_factory=lambda: {"host": 0, "disk": 0})

    def run(
        self, items: ArenaItems, host: ArenaMemory, folder: Folder | None, *, verify: bool
    ) -> None:
        """All parts but those after one of their group that has failed, in order."""
        batches = list(self._batches())
        largest = max(sum(map(_size, batch)) for batch in batches)
        buffer = torch.empty(largest, dtype=torch.uint8)
        told = 0
        for place, batch in enumerate(batches):
            while folder is not None and told < min(place + AHEAD, len(batches)):
                self._read_ahead(batches[told], folder)
                told += 1
            parts = [part for part in batch if not self._is_vain(part)]
            if not parts:
                continue
            if self.is_over:
                return
            source = parts[0].source
            if isinstance(source, FileRange):
                assert folder is not None
                self._read(parts, items, folder, buffer=buffer, verify=verify)
            elif isinstance(source, int):
                self._write(parts, items, host.tensor, base=0)
                self.nbytes["host"] += sum(items.chunks.nbytes(part.item) for part in parts)

    def end(self, cause: str) -> LoadFailure | None:
        """Nothing is written any more. The failure to report, `cause` for what is not done.

        One for all groups: the tokens before it are good in every attention group.
        """
        with self.lock:
            self.is_over = True
        for part in self.load.parts:
            if part not in self.done:
                self._fail(part.item, cause)
        failed = dict(self.failed)  # a thread that hangs may still add to it
        if not failed:
            return None
        attention = {group: it for group, it in failed.items() if group != STATES}
        if not attention:
            return LoadFailure(self.load.request_id, failed[STATES][0], STATES)
        group = min(attention, key=lambda group: attention[group][1])
        return LoadFailure(self.load.request_id, attention[group][0], group, attention[group][1])

    def fail(self, part: LoadPart, cause: str) -> None:
        """A part cannot be loaded, and so nothing after it in its group."""
        self._fail(part.item, cause)
        if isinstance(part.source, FileRange) and cause != "timeout":
            self.bad.append((part.source.name, part.item))

    def _fail(self, item: Item, cause: str) -> None:
        known = self.failed.get(item.group)
        if known is None or item.start < known[1]:
            self.failed[item.group] = (cause, item.start)

    def _is_vain(self, part: LoadPart) -> bool:
        return part.item.group in self.failed and part.item.start >= self.failed[part.item.group][1]

    def _batches(self) -> Iterator[list[LoadPart]]:
        """Parts that are read at once: neighbours in one file, or all of the host tier in a row."""
        batch: list[LoadPart] = []
        nbytes = 0
        for part in self.load.parts:
            if batch and not (_follows(batch[-1], part) and nbytes + _size(part) <= READ_BYTES):
                yield batch
                batch, nbytes = [], 0
            batch.append(part)
            nbytes += _size(part)
        if batch:
            yield batch

    def _read_ahead(self, parts: Sequence[LoadPart], folder: Folder) -> None:
        first, last = parts[0].source, parts[-1].source
        if isinstance(first, FileRange) and isinstance(last, FileRange):
            # What is wrong with the file, the read will tell.
            with suppress(OSError):
                nbytes = last.offset + last.nbytes - first.offset
                folder.files.read_ahead(first.name, first.offset, nbytes)

    def _read(
        self,
        parts: Sequence[LoadPart],
        items: ArenaItems,
        folder: Folder,
        *,
        buffer: torch.Tensor,
        verify: bool,
    ) -> None:
        ranges = [part.source for part in parts if isinstance(part.source, FileRange)]
        name, first = ranges[0].name, ranges[0].offset
        content = buffer.numpy().data[: ranges[-1].offset + ranges[-1].nbytes - first]
        try:
            num_read = folder.files.read(name, first, content)
            folder.use(name)
            cause = "short"
        except FileNotFoundError:
            num_read, cause = 0, "vanished"
        except OSError:
            num_read, cause = 0, "io"
        good = []
        for part, found in zip(parts, ranges, strict=True):
            end = found.offset + found.nbytes - first
            if end > num_read:
                self.fail(part, cause)
                continue
            try:
                if verify:
                    check(found, content[found.offset - first : end])
            except TierFileError as error:
                self.fail(part, error.cause)
                continue
            good.append(part)
        self._write(good, items, buffer, base=first)
        self.nbytes["disk"] += num_read

    def _write(
        self, parts: Sequence[LoadPart], items: ArenaItems, dense: torch.Tensor, *, base: int
    ) -> None:
        packed = []
        for part in parts:
            offset = part.source.offset if isinstance(part.source, FileRange) else part.source
            assert isinstance(offset, int)
            packed.append((part.item, part.target, offset - base))
        with self.lock:
            if self.is_over:
                return
            items.unpack(packed, dense)
        self.done.update(parts)


def _follows(last: LoadPart, part: LoadPart) -> bool:
    one, other = last.source, part.source
    if isinstance(one, FileRange) and isinstance(other, FileRange):
        return one.name == other.name and one.offset + one.nbytes == other.offset
    return isinstance(one, int) and isinstance(other, int)


def _size(part: LoadPart) -> int:
    # Slots of the host tier need no buffer; so many are copied between two looks at the deadline.
    return part.source.nbytes if isinstance(part.source, FileRange) else 65_536
