"""The disk tier's folder: whose files are there, which go first, and the bound on all of them.

Several nodes may share it, and its files outlive them: names are unique, a file is never changed,
and the time of its last use is kept by the file system. Used by the tier's own threads only.
"""

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property, partial

import structlog

from connector.offload.messages import FileItems
from connector.offload.metrics import OffloadStats
from connector.offload.tiers.tier_file import Files, FoundFile, TierFileError, read_items

log = structlog.get_logger()

PREFIX, SUFFIX = "tandem-", ".kv"
STALE_S = 600.0
"""A temporary file that nobody has written to for so long was left by a crash."""
TOUCH_S = 10.0
"""A file's time of use is kept as exactly as this."""
PROGRESS_S = 5.0
TICK_NS = 1_500_000_000
"""The coarsest clock of a file system, and some more."""


class Folder:
    """At most `max_bytes` of files of this format, of this and other nodes and geometries.

    Files with other names are never touched. `geometry` (`ChunkPlan.geometry`) is asked for at the
    first use, when the model is known.
    """

    def __init__(
        self, files: Files, geometry: Callable[[], str], max_bytes: int, *, stats: OffloadStats
    ) -> None:
        self.files = files
        self._geometry = geometry
        self._max_bytes = max_bytes
        self._stats = stats
        self._lock = threading.Lock()
        self._known: dict[str, FoundFile] = {}
        self._touched: dict[str, float] = {}
        self._changed_ns = -1
        self._told: set[str] = set()  # why files of this scan are left out: one line each
        self._told_of_others = False

    @cached_property
    def geometry(self) -> str:
        """The name of all that this node can read."""
        return self._geometry()

    @property
    def num_bytes(self) -> int:
        """Bytes of all files, as far as is known."""
        with self._lock:
            return sum(file.nbytes for file in self._known.values())

    def new_name(self) -> str:
        """A name that no file had or will have."""
        return f"{PREFIX}{self.geometry}-{secrets.token_hex(8)}{SUFFIX}"

    def make_room(self, nbytes: int) -> Iterator[str]:
        """Removes the least recently used files, so that one of `nbytes` bytes may be added.

        Yields the name of each. Raises OSError where one cannot be removed.
        """
        with self._lock:
            order = sorted(self._known.values(), key=lambda file: file.used_ns)
        excess = sum(file.nbytes for file in order) + nbytes - self._max_bytes
        for file in order:
            if excess <= 0:
                return
            self.files.remove(file.name)
            excess -= file.nbytes
            with self._lock:
                self._known.pop(file.name, None)
            self._touched.pop(file.name, None)
            yield file.name

    def add(self, name: str, nbytes: int) -> None:
        """A file was written here, after room was made for it."""
        with self._lock:
            self._known[name] = FoundFile(name, nbytes, time.time_ns())

    def use(self, name: str) -> None:
        """The file is read: it is the last to go, here and for the other nodes."""
        now = time.monotonic()
        if now - self._touched.get(name, -TOUCH_S) < TOUCH_S:
            return
        self._touched[name] = now
        with self._lock:
            if (file := self._known.get(name)) is not None:
                self._known[name] = file._replace(used_ns=time.time_ns())
        # What cannot be written to can still be read.
        with suppress(OSError):
            self.files.touch(name)

    def rescan(self) -> Iterator[FileItems | str]:
        """New files with their items, and the names of those that are gone; long after a start.

        May raise OSError. Yields nothing if no file has come or gone.
        """
        changed = self.files.changed_ns()
        if changed == self._changed_ns:
            return
        with self._lock:
            known = list(self._known)  # what is added from now on may not be listed yet
        found = {file.name: file for file in self.files.scan() if file.name.startswith(PREFIX)}
        for name, file in found.items():
            if name.endswith(".tmp") and time.time() - file.used_ns / 1e9 > STALE_S:
                with suppress(OSError):
                    self.files.remove(name)
        ours = {name: it for name, it in found.items() if name.endswith(SUFFIX)}  # any geometry's
        with self._lock:
            gone = [name for name in known if name not in ours]
            for name in gone:
                self._known.pop(name, None)
                self._touched.pop(name, None)
            new = [file for name, file in ours.items() if name not in self._known]
            # Those of another node may have been used there meanwhile.
            self._known.update(ours)
        yield from gone
        self._told.clear()
        self._tell_of_others(new)
        told = time.monotonic()
        for number, file in enumerate(new):
            if (items := self._read(file)) is not None:
                yield items
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                log.info("the offload folder is being read", done=number + 1, files=len(new))
        # What changes within a tick of the file system's clock has the same time: look again then.
        self._changed_ns = changed if time.time_ns() - changed > TICK_NS else -1
        yield from self.make_room(0)

    def _read(self, file: FoundFile) -> FileItems | None:
        """The items of a file; None, and counted, if it cannot be used."""
        if not self._is_own(file.name):
            self._stats.bad_files["foreign"] += 1
            return None
        try:
            read = partial(self.files.read, file.name)
            return read_items(file.name, file.nbytes, self.geometry, read=read)
        except TierFileError as error:
            self._leave_out(file.name, error.cause, error)
        except FileNotFoundError:
            self._stats.bad_files["vanished"] += 1
        except OSError as error:
            self._leave_out(file.name, "io", error)
        return None

    def _tell_of_others(self, new: Sequence[FoundFile]) -> None:
        """Logs once that the folder has other files: of other nodes, weights or configurations."""
        others = sum(not self._is_own(file.name) for file in new)
        if others and not self._told_of_others:
            self._told_of_others = True
            log.info(
                "the offload folder has files of other models, layouts or seeds; this node leaves "
                "them out",
                folder=str(self.files.folder),
                files=others,
                of=len(new),
                geometry=self.geometry,
            )

    def _is_own(self, name: str) -> bool:
        return name.startswith(f"{PREFIX}{self.geometry}-")

    def _leave_out(self, name: str, cause: str, error: Exception) -> None:
        """Counts a bad file; the first of each cause in a scan is named, for there may be many."""
        self._stats.bad_files[cause] += 1
        if cause not in self._told:
            self._told.add(cause)
            log.warning("a file of the offload folder is left out", name=name, why=str(error))
