"""The safetensors files of a model, read once and block by block by several threads. Torch-free.

A block goes from the file to where its tensor shall be, or to a buffer that is used again: no page
of a file is mapped, so a file that is cut or a disk that fails is an error and no signal, and
besides the tensors themselves a load holds one block per thread. The kernel is asked to read ahead
in the order of use: what it has read is page cache.
"""

import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Self

from engine.errors import CheckpointError
from engine.model_files import weight_files
from engine.safetensors_headers import StoredTensor, headers_of
from engine.weights.load_progress import LoadProgress

THREADS: Final = 4
BLOCK_BYTES: Final = 2 << 20
"""It stays in a core's cache while it is read, hashed and converted; of any type, whole items."""
AHEAD_BYTES: Final = 256 << 20

Writable = Callable[[int, int], AbstractContextManager[memoryview]]
"""(offset, size) of a block in its tensor, in bytes: memory that is filled inside the `with`."""


class FileStat(NamedTuple):
    """Marks of a file that differ from another's, and change when it is written again.

    `changed_ns` is set by the kernel alone: a copy that keeps `mtime_ns` does not keep this one.
    """

    size: int
    mtime_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, file: Path | int) -> "FileStat":
        """Of a path or a descriptor. May raise OSError."""
        found = os.stat(file)
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


class WeightFiles:
    """The weights in `folder`; use as a context manager, which owns its descriptors and threads.

    `tensors` in the order of the files, `stats` by file name, both as they were opened. `heard_by`
    is called in the reading threads for each block of each tensor, the first time it is read; an
    empty tensor has one empty block. Setting `stop` ends a load: what is read then raises.

    All that cannot be read raises a CheckpointError that names its file.
    """

    def __init__(self, folder: Path, stop: threading.Event | None = None) -> None:
        self.folder = folder
        self.tensors: list[StoredTensor] = []
        self.stats: Mapping[str, FileStat] = {}
        self.heard_by: Callable[[StoredTensor, int, memoryview], None] | None = None
        self._stop = stop or threading.Event()
        self._buffers: list[memoryview] = []
        self._ahead: list[StoredTensor] = []
        self._num_ahead = 0  # bytes that the kernel was asked for, less those that were read

    def __enter__(self) -> Self:
        with ExitStack() as opened:
            stats = {}
            for path in weight_files(self.folder):
                try:
                    descriptor = opened.enter_context(path.open("rb", buffering=0)).fileno()
                    stats[path.name] = FileStat.of(descriptor)
                    self.tensors += headers_of(path, descriptor, stats[path.name].size)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
            self.stats = stats
            self._unread = dict.fromkeys(self.tensors)
            total = sum(tensor.num_bytes for tensor in self.tensors)
            self._progress = opened.enter_context(LoadProgress(total))
            self._readers = ThreadPoolExecutor(THREADS, "weights-read")
            # One that asks the kernel, which may let it wait until the disk takes more requests.
            self._asker = ThreadPoolExecutor(1, "weights-ahead")
            for pool in (self._readers, self._asker):
                opened.callback(pool.shutdown, cancel_futures=True)
            self._opened = opened.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Gives descriptors and threads back, and ends the bar. Idempotent."""
        self._opened.close()

    @property
    def unread(self) -> list[StoredTensor]:
        """The tensors that nobody has read so far."""
        return list(self._unread)

    def read_ahead(self, tensors: Iterable[StoredTensor]) -> None:
        """Lets the kernel read these, a bounded number of bytes before they are asked for."""
        self._ahead = sorted(tensors, key=_order_of_use, reverse=True)

    def read(self, tensor: StoredTensor, writable: Writable | None = None) -> None:
        """Reads `tensor` to where `writable` says, else into buffers. In one thread at a time."""
        self._ask_ahead(tensor.num_bytes)
        read = partial(self._read_block, tensor, writable or self._anywhere)
        if tensor.num_bytes <= BLOCK_BYTES:
            read(0)
        else:
            for _ in self._readers.map(read, range(0, tensor.num_bytes, BLOCK_BYTES)):
                pass
        self._unread.pop(tensor, None)

    def are_equal(self, first: StoredTensor, second: StoredTensor) -> bool:
        """True if both have the same bytes. Up to where they differ; neither counts as read."""
        if first.num_bytes != second.num_bytes:
            return False
        for offset in range(0, first.num_bytes, BLOCK_BYTES):
            size = min(BLOCK_BYTES, first.num_bytes - offset)
            with self.buffer(size) as one, self.buffer(size) as other:
                self._fill(first, one, offset)
                self._fill(second, other, offset)
                if one != other:
                    return False
        return True

    @contextmanager
    def buffer(self, size: int) -> Iterator[memoryview]:
        """Memory for `size` bytes of a block, lent; from any thread."""
        # Fresh memory costs more than what is read into it: the kernel clears page after page.
        try:
            buffer = self._buffers.pop()
        except IndexError:
            buffer = memoryview(bytearray(BLOCK_BYTES))
        yield buffer[:size]
        self._buffers.append(buffer)

    def _anywhere(self, _offset: int, size: int) -> AbstractContextManager[memoryview]:
        return self.buffer(size)

    def _read_block(self, tensor: StoredTensor, writable: Writable, offset: int) -> None:
        size = min(BLOCK_BYTES, tensor.num_bytes - offset)
        with writable(offset, size) as block:
            self._fill(tensor, block, offset)
            if self.heard_by and tensor in self._unread:
                self.heard_by(tensor, offset, block)
        self._progress.add(size)

    def _fill(self, tensor: StoredTensor, block: memoryview, offset: int) -> None:
        done = 0
        while done < len(block):
            if self._stop.is_set():
                raise CheckpointError(f"{tensor.path} is not needed any more")
            done += _read_some(tensor, block[done:], offset + done)

    def _ask_ahead(self, num_bytes: int) -> None:
        """Keeps the kernel AHEAD_BYTES before the one who takes `num_bytes` now."""
        self._num_ahead -= num_bytes
        while self._ahead and self._num_ahead < AHEAD_BYTES:
            it = self._ahead.pop()
            self._num_ahead += it.num_bytes
            place = it.descriptor, it.start, it.num_bytes
            self._asker.submit(os.posix_fadvise, *place, os.POSIX_FADV_WILLNEED)


def _read_some(tensor: StoredTensor, memory: memoryview, offset: int) -> int:
    try:
        count = os.preadv(tensor.descriptor, [memory], tensor.start + offset)
    except OSError as error:
        raise CheckpointError(f"{tensor.path} cannot be read: {error.strerror}") from error
    if not count:
        raise CheckpointError(f"{tensor.path} cannot be read: it ends inside a tensor")
    return count


def _order_of_use(tensor: StoredTensor) -> tuple[int, int]:
    """Embeddings, layers by number, the rest: a layer's own order does not matter to a kernel."""
    number = re.search(r"\.(\d+)\.", tensor.name)
    if number:
        return 1, int(number[1])
    return (0 if "embed" in tensor.name else 2), 0
