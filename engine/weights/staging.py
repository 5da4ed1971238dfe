"""Page-locked memory between the files of a model and a device: a few blocks, used again and again.

    file --read--> block 0 --queued copy--> its place on the device
    file --read--> block 1 --queued copy--> ...
                   block 0 is filled anew once the event after its copy has happened

A tensor that is stored in another type goes through a block on the device, which converts it. So a
load holds `NUM_BLOCKS` blocks on the host and as many on the device beside the weights, whatever
their size: 16 MiB each.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from queue import SimpleQueue
from typing import Final, Protocol

import torch
from torch import Tensor

from engine.weights.files import BLOCK_BYTES, THREADS

NUM_BLOCKS: Final = 2 * THREADS
"""Each reading thread fills one while another is copied."""


class CopyEvent(Protocol):
    """A mark in a device's queue, as `torch.cuda.Event`."""

    def record(self) -> None:
        """Puts the mark after all that is queued so far in the thread's current stream."""

    def synchronize(self) -> None:
        """Returns when the device has reached the last mark; at once if there is none."""


class Staging:
    """`NUM_BLOCKS` blocks of `BLOCK_BYTES` for copies to `device`; usable from any thread.

    Copies are queued in the stream that is the current one where this is made: what is queued there
    later finds them done.
    """

    def __init__(self, device: torch.device) -> None:
        size = NUM_BLOCKS * BLOCK_BYTES
        # A card reads other memory at a third of the rate, and its copy cannot be queued.
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        # Of a thread that reads, the current stream is another, and may be another device's.
        queued: Callable[[], AbstractContextManager[object]] = nullcontext
        if device.type == "cuda":
            queued = partial(torch.cuda.stream, torch.cuda.current_stream(device))
        self._blocks = [_Block(part, device, queued) for part in host.chunk(NUM_BLOCKS)]
        # First in, first out: the block whose copy was queued first is free first.
        self._free: SimpleQueue[_Block] = SimpleQueue()
        for block in self._blocks:
            self._free.put(block)

    @contextmanager
    def filled(self, target: Tensor, dtype: torch.dtype) -> Iterator[memoryview]:
        """Memory for n numbers of `dtype`, at most a block of bytes, to fill inside the `with`.

        `target`, contiguous [n] on the device, has them, converted, for all that is queued there
        afterwards. After an exception nothing is copied.
        """
        block = self._free.get()
        try:
            block.event.synchronize()
            yield block.host[: target.numel() * dtype.itemsize].numpy().data
            block.copy_to(target, dtype)
        finally:
            self._free.put(block)

    def finish(self) -> None:
        """Returns when every copy has ended: other streams may then read what was filled."""
        for block in self._blocks:
            block.event.synchronize()


class _Block:
    """`host`: uint8 [BLOCK_BYTES]. `event`: after the last copy from it."""

    def __init__(
        self,
        host: Tensor,
        device: torch.device,
        queued: Callable[[], AbstractContextManager[object]],
    ) -> None:
        self.host = host
        self.event = new_event(device)
        self._device = device
        self._queued = queued
        self._stored: Tensor | None = None

    def copy_to(self, target: Tensor, dtype: torch.dtype) -> None:
        size = target.numel() * dtype.itemsize
        stored = self.host[:size].view(dtype)
        with self._queued():
            if dtype != target.dtype:
                if self._stored is None:
                    self._stored = torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=self._device)
                # Whoever reads it was queued before: the device takes both in order.
                stored = self._stored[:size].view(dtype).copy_(stored, non_blocking=True)
            target.copy_(stored, non_blocking=True)
            self.event.record()


class _Ended:
    """Of a device whose copies have ended when the call returns."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


def new_event(device: torch.device) -> CopyEvent:
    """An event of `device`; a thread that waits for it sleeps, so that others read and hash."""
    if device.type != "cuda":
        return _Ended()
    event: CopyEvent = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return event
