"""The worker side of the OffloadConnector: moves the bytes between the arena and the tiers."""

import errno
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import structlog
import torch
import xxhash

from connector.offload.config import OffloadConfig
from connector.offload.messages import (
    STATES,
    FileItems,
    FileWrite,
    Orders,
    Place,
    Report,
    WriteDone,
)
from connector.offload.metrics import OffloadStats
from connector.offload.tiers.arena_items import ArenaItems
from connector.offload.tiers.folder import Folder
from connector.offload.tiers.load_job import LoadJob
from connector.offload.tiers.tier_file import Header, encode, ranges_of
from engine.arena import ArenaMemory
from engine.kv_connector import WorkerConnector
from engine.step import ConnectorOutput, LoadFailure

log = structlog.get_logger()

NUM_READERS, NUM_WRITERS = 2, 1
MAX_WAITING = 256
RESCAN_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 2.0, 60.0
"""After a write has failed; doubled each time."""
FILES_PER_STEP = 64
END_OF_THREADS_S = 1.0
Job = Callable[[], None]


class OffloadWorker(WorkerConnector):
    """Owner of the host tier's bytes, and of the threads that read and write the disk's.

    Evicted items are copied to the host tier by the engine's own thread, before the step writes;
    all other copies are made by threads. A file is hashed and written from a buffer, so the arena's
    blocks are pinned only while they are copied there.
    """

    def __init__(
        self,
        items: ArenaItems,
        host: ArenaMemory,
        folder: Folder | None,
        *,
        config: OffloadConfig,
        stats: OffloadStats,
        wake: Callable[[], None],
    ) -> None:
        self._items = items
        self._host = host
        self._folder = folder
        self._config = config
        self._stats = stats
        self._wake = wake
        self._jobs: dict[int, LoadJob] = {}
        self._failed_at_once: list[LoadFailure] = []
        # Filled by threads, emptied by `get_finished`; appending and popping are atomic.
        self._ended: deque[LoadJob] = deque()
        self._saved: deque[str] = deque()
        self._written: deque[WriteDone] = deque()
        self._found: deque[FileItems | str] = deque()
        self._is_closing = False
        self._no_writes_before = 0.0
        self._pause_s = FIRST_PAUSE_S
        self._was_writable = True
        self._readers = IoThreads("kv-offload-read", NUM_READERS, MAX_WAITING)
        self._writer = IoThreads("kv-offload-write", NUM_WRITERS, MAX_WAITING)
        self._scanner = None if folder is None else IoThreads("kv-offload-scan", 1, 1)
        self._next_scan = 0.0

    # --- the seam ----------------------------------------------------------------------------

    def start_save(self, message: Any) -> None:
        """Copies what this step evicts; files are written by a thread."""
        if message is None:
            return
        assert isinstance(message, Orders)
        copies = message.copies
        self._items.pack(((it.item, it.source, it.offset) for it in copies), self._host.tensor)
        self._stats.stored_bytes["host"] += sum(self._items.chunks.nbytes(c.item) for c in copies)
        for write in message.writes:
            if not self._writer.submit(partial(self._write, write)):
                self._write_failed(write, "busy", "too many files wait")

    def start_load(self, message: Any) -> None:
        """Begins the loads. What the arena has itself is copied here, before the step writes."""
        if message is None:
            return
        for load in message.loads:
            job = LoadJob(load, time.monotonic() + self._config.load_timeout_seconds)
            self._jobs[load.load_id] = job
            for part in load.parts:
                if isinstance(part.source, Place):
                    self._items.copy_within(part.item, part.source, part.target)
                    job.done.add(part)
                elif part.source is None:
                    job.fail(part, "evicted")
            if not self._readers.submit(partial(self._load, job)):
                job.failed = {part.item.group: ("busy", 0) for part in load.parts}
                self._ended.append(job)

    def get_finished(self) -> ConnectorOutput:
        """Loads, saves and files that ended, and loads that ran out of time."""
        now = time.monotonic()
        if self._scanner is not None and now >= self._next_scan:
            self._next_scan = now + RESCAN_S
            self._scanner.submit(self._scan)
        ended = [self._ended.popleft() for _ in range(len(self._ended))]
        late = [job for job in self._jobs.values() if not job.is_over and now >= job.deadline]
        loaded: list[str] = []
        failed: list[LoadFailure] = []
        due = [*((job, "error") for job in ended), *((job, "timeout") for job in late)]
        for job, cause in due:
            if job.is_over:
                continue
            if (failure := self._end(job, cause)) is None:
                loaded.append(job.load.request_id)
            else:
                failed.append(failure)
        for job in ended:
            del self._jobs[job.load.load_id]
        saved = tuple(self._saved.popleft() for _ in range(len(self._saved)))
        news = self._news(ended, now)
        return ConnectorOutput(tuple(loaded), tuple(failed), saved=saved, message=news)

    def next_deadline(self) -> float | None:
        """When a load runs out of time, the folder is looked at, or the disk is tried again."""
        deadlines = [job.deadline for job in self._jobs.values() if not job.is_over]
        if self._folder is not None:
            deadlines.append(self._next_scan)
        if not self._was_writable:
            deadlines.append(self._no_writes_before)
        return min(deadlines, default=None)

    def close(self) -> None:
        """Ends every load. The threads go on until `end`, which writes what is left."""
        self._is_closing = True
        for job in self._jobs.values():
            job.end("closed")

    def end(self, writes: Iterable[FileWrite]) -> None:
        """Makes these last writes, as far as the time reaches, ends the threads and frees memory.

        The arena must still be there; nobody else writes to it.
        """
        self._flush(tuple(writes), time.monotonic() + self._config.flush_timeout_seconds)
        for threads in (self._scanner, self._readers, self._writer):
            if threads is not None and not threads.close(END_OF_THREADS_S):
                log.warning("the offload tier's disk hangs; its thread is left to the process")
        self._host.close()

    # --- loads -------------------------------------------------------------------------------

    def _load(self, job: LoadJob) -> None:
        try:
            job.run(self._items, self._host, self._folder, verify=self._config.verify)
        except Exception:  # a thread must go on, and its load end; what is not done has failed
            log.exception("a load from a tier failed")
        self._ended.append(job)
        self._wake()

    def _end(self, job: LoadJob, cause: str) -> LoadFailure | None:
        failure = job.end(cause)
        for tier, nbytes in job.nbytes.items():
            self._stats.loaded_bytes[tier] += nbytes
        if failure is not None:
            self._stats.failed_loads[failure.cause] += 1
            if failure.group == STATES:
                group = self._items.chunks.arena.state_groups[0]
                failure = LoadFailure(failure.request_id, failure.cause, group)
        return failure

    def _news(self, ended: list[LoadJob], now: float) -> Report | None:
        news = [self._found.popleft() for _ in range(min(len(self._found), FILES_PER_STEP))]
        found = tuple(it for it in news if isinstance(it, FileItems))
        gone = tuple(it for it in news if isinstance(it, str))
        if self._found:
            self._wake()
        written = tuple(self._written.popleft() for _ in range(len(self._written)))
        is_writable = now >= self._no_writes_before
        if not (ended or found or gone or written) and is_writable == self._was_writable:
            return None
        self._was_writable = is_writable
        bad = tuple(it for job in ended for it in job.bad)
        numbers = tuple(job.load.load_id for job in ended)
        return Report(written, found, gone, bad, numbers, is_writable)

    # --- files -------------------------------------------------------------------------------

    def _write(self, write: FileWrite) -> None:
        """One file, in the writer's thread."""
        assert self._folder is not None
        sizes = [self._items.chunks.nbytes(item) for item in write.items]
        buffer = torch.empty(sum(sizes), dtype=torch.uint8)
        offsets = [sum(sizes[:number]) for number in range(len(sizes))]
        packed = []
        placed = zip(write.items, write.sources, offsets, sizes, strict=True)
        for item, source, offset, size in placed:
            if isinstance(source, Place):
                packed.append((item, source, offset))
            else:
                buffer[offset : offset + size].copy_(self._host.tensor[source : source + size])
        self._items.pack(packed, buffer)
        if write.save_id is not None:
            self._saved.append(write.save_id)
            self._wake()
        content = buffer.numpy().data
        parts = [content[start : start + size] for start, size in zip(offsets, sizes, strict=True)]
        digests = tuple(map(xxhash.xxh3_64_intdigest, parts))
        header = Header(self._folder.geometry, write.items, tuple(offsets), tuple(sizes), digests)
        name, start = self._folder.new_name(), encode(header)
        nbytes = len(start) + len(content)
        try:
            self._found.extend(self._folder.make_room(nbytes))
            self._folder.files.write(name, (memoryview(start), content))
        except OSError as error:
            cause = errno.errorcode.get(error.errno or 0, type(error).__name__)
            self._write_failed(write, cause, str(error))
            return
        self._folder.add(name, nbytes)
        if self._pause_s > FIRST_PAUSE_S:
            log.info(
                "the offload folder can be written to again", folder=str(self._folder.files.folder)
            )
        self._pause_s = FIRST_PAUSE_S
        self._stats.stored_bytes["disk"] += len(content)
        self._written.append(WriteDone(write.write_id, ranges_of(name, header)))
        self._wake()

    def _write_failed(self, write: FileWrite, cause: str, detail: str) -> None:
        """One warning until it works again; nothing is written for a while."""
        self._stats.failed_writes[cause] += 1
        if self._pause_s == FIRST_PAUSE_S:
            log.warning(
                "the offload folder cannot be written to; what is there is still used",
                cause=cause,
                detail=detail,
            )
        self._no_writes_before = time.monotonic() + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._written.append(WriteDone(write.write_id, None))
        self._wake()

    def _flush(self, writes: tuple[FileWrite, ...], deadline: float) -> None:
        for number, write in enumerate(writes):
            if time.monotonic() >= deadline or not self._writer.submit(
                partial(self._write_in_time, write, deadline)
            ):
                log.warning(
                    "not all could be written to the offload folder", left=len(writes) - number
                )
                return
        while time.monotonic() < deadline and len(self._written) < len(writes):
            time.sleep(0.005)
        if writes:
            log.info(
                "the offload folder has what was here", files=len(self._written), of=len(writes)
            )

    def _write_in_time(self, write: FileWrite, deadline: float) -> None:
        if time.monotonic() < deadline:
            self._write(write)

    def _scan(self) -> None:
        assert self._folder is not None
        try:
            for news in self._folder.rescan():
                if self._is_closing:
                    return
                self._found.append(news)
                if len(self._found) == 1:
                    self._wake()
        except OSError as error:
            self._stats.bad_files["io"] += 1
            log.warning("the offload folder cannot be read", why=str(error))


class IoThreads:
    """`count` daemon threads, bounded queue: a disk that hangs keeps no node from ending.

    They run jobs in order. A job reports its own failures and never raises.
    """

    def __init__(self, name: str, count: int, max_waiting: int) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_waiting + count)
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> bool:
        """False, and nothing done, while too many jobs wait."""
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            return False
        return True

    def close(self, timeout_s: float) -> bool:
        """Ends the threads after the jobs that wait; False if they have not ended in time."""
        for _ in self._threads:
            try:
                self._jobs.put(None, timeout=timeout_s)
            except queue.Full:
                return False
        for thread in self._threads:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in self._threads)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
