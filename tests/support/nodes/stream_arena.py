"""An arena on a device whose streams are queues, on the CPU: bytes move late, and in any order.

Nothing that is queued happens before somebody waits for it, or by chance. A stream runs its own
work in order; which stream goes on next is drawn. So whoever relies on more order than streams,
events and the host give reads a byte too early, for some seed.
"""

import mmap
import os
import random
import struct
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from threading import RLock

import numpy as np
import numpy.typing as npt
import torch

from connector.transports.cuda_ipc import CudaIpcTransport
from connector.transports.cuda_memory import HANDLE_BYTES, CudaMemory, DeviceRegion, OpenedMemory
from engine.arena import ArenaMemory
from engine.digests import Spans, digest
from engine.errors import TransportError

Work = Callable[[], object]
DEVICE = "0" * 32
HANDLE = struct.Struct("<ii")
MOST_BY_CHANCE = 3


class Event:
    """Comes when all is done that its stream had been given before it."""

    def __init__(self, device: "Device") -> None:
        self._device = device
        self.is_come = False

    def query(self) -> bool:
        """A little may have happened meanwhile."""
        self._device.go_on_by_chance()
        return self.is_come

    def synchronize(self) -> None:
        """Other streams go on too while this one is waited for."""
        self._device.run_until(self)

    def come(self) -> None:
        self.is_come = True


class Stream:
    """Work in order; an event in it holds up what comes after it."""

    def __init__(self, device: "Device") -> None:
        self.device = device
        self.queue: deque[Work | Event] = deque()
        device.streams.append(self)

    def do(self, *work: Work) -> None:
        with self.device.lock:
            self.queue.extend(work)

    def wait_event(self, event: Event) -> None:
        with self.device.lock:
            self.queue.append(event)

    def record(self) -> Event:
        event = Event(self.device)
        self.do(event.come)
        return event


class Device:
    """All streams of one device, whose work runs when the host waits, in an order that is drawn."""

    def __init__(self, seed: int) -> None:
        self.lock = RLock()
        self.streams: list[Stream] = []
        self._random = random.Random(seed)

    def run_until(self, event: Event) -> None:
        while True:
            # Under the lock: another thread may have just done the last of all work.
            with self.lock:
                if event.is_come:
                    return
                assert self._go_on(), "the host waits for an event that cannot come"

    def go_on_by_chance(self) -> None:
        for _ in range(self._random.randrange(MOST_BY_CHANCE)):
            self._go_on()

    def _go_on(self) -> bool:
        """One piece of work of one stream that is not held up; false if there is none."""
        with self.lock:
            for stream in self.streams:
                while stream.queue and isinstance(first := stream.queue[0], Event):
                    if not first.is_come:
                        break
                    stream.queue.popleft()
            able = [it for it in self.streams if it.queue and not isinstance(it.queue[0], Event)]
            if able:
                work = self._random.choice(able).queue.popleft()
                assert not isinstance(work, Event)
                work()
            return bool(able)


class StreamArena(ArenaMemory):
    """On device 0; `engine` is the stream of its node's steps. `bytes_now` is for tests."""

    def __init__(self, nbytes: int, device: Device) -> None:
        super().__init__(nbytes)
        self._memfd, self.fd = self.fd, None
        self.device_index, self._host = 0, None
        self.gpu = device
        self.engine, self.side = Stream(device), Stream(device)
        self._marked: Event | None = None

    @property
    def memfd(self) -> int:
        """Only what plays the driver knows it."""
        assert self._memfd is not None
        return self._memfd

    def bytes_now(self, offset: int, length: int) -> memoryview:
        """As the device has them at this moment."""
        return self.tensor.numpy().data[offset : offset + length]

    def host_bytes(self) -> memoryview:
        """For the transport with points of faults, which looks at them at its points only."""
        return self.bytes_now(0, self.nbytes)

    def mark_prepared(self) -> None:
        self._marked = self.engine.record()

    def wait_for_prepared(self) -> None:
        if self._marked is not None:
            self._marked.synchronize()

    def read(self, offset: int, length: int) -> memoryview:
        found = torch.empty(length, dtype=torch.uint8)
        self.side.do(lambda: found.copy_(self.tensor[offset : offset + length]))
        self.side.record().synchronize()
        return found.numpy().data

    @contextmanager
    def writable(self, offset: int, length: int) -> Iterator[memoryview]:
        buffer = torch.empty(length, dtype=torch.uint8)
        yield buffer.numpy().data
        self._after_mark()
        self.side.do(lambda: self.tensor[offset : offset + length].copy_(buffer))
        self.side.record().synchronize()

    def digests(self, blocks: Sequence[Spans]) -> list[int]:
        found: list[int] = []
        for block in blocks:
            self.side.do(partial(self._hash, block, found))
        self.side.record().synchronize()
        return found

    def copy_from(self, source: torch.Tensor, spans: npt.NDArray[np.int64]) -> Event:
        self._after_mark()
        for start, to, length in spans.tolist():
            target = self.tensor[to : to + length]
            self.side.do(partial(target.copy_, source[start : start + length]))
        return self.side.record()

    def close(self) -> None:
        super().close()
        if self._memfd is not None:
            os.close(self._memfd)
            self._memfd = None

    def _hash(self, block: Spans, found: list[int]) -> None:
        found.append(digest(self.bytes_now, block))

    def _after_mark(self) -> None:
        if self._marked is not None:
            self.side.wait_event(self._marked)


class SharedMemory(CudaMemory):
    """Plays the driver: a handle names a process and its memfd. `num_open`: handles not closed."""

    num_open = 0

    def __init__(self) -> None:
        pass

    def export(self, arena: ArenaMemory) -> DeviceRegion:
        assert isinstance(arena, StreamArena)
        handle = HANDLE.pack(os.getpid(), arena.memfd).ljust(HANDLE_BYTES, b"\0")
        return DeviceRegion(handle, 0, arena.nbytes, DEVICE)

    def open(self, region: DeviceRegion, near: int) -> OpenedMemory:
        if region.device != DEVICE:
            raise TransportError(
                f"the peer's device {region.device} is not visible to this process"
            )
        pid, fd = HANDLE.unpack_from(region.handle)
        try:
            with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
                if region.offset + region.nbytes > os.fstat(file.fileno()).st_size:
                    raise TransportError("the region ends past the peer's allocation")
                content = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        except OSError as error:
            raise TransportError(f"the CUDA driver could not open the handle: {error}") from error
        SharedMemory.num_open += 1
        return OpenedMemory(content[region.offset :][: region.nbytes], fd, near)

    def close(self, opened: OpenedMemory) -> None:
        SharedMemory.num_open -= 1


class SharedIpc(CudaIpcTransport):
    """The transport, over what plays the driver."""

    memory = SharedMemory
