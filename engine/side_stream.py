"""The stream of a device on which bytes come, go and are hashed, beside the engine's."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class SideStream:
    """One stream of device `index`, and the last mark that the engine has left on its own.

    All of its methods may be called from any thread. Made once the device has done all that was
    queued, so nothing of before is missed.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        torch.cuda.synchronize(index)
        # Torch's streams do not wait for the legacy default stream, nor that one for them.
        self._stream = torch.cuda.Stream(index)  # type: ignore[no-untyped-call]
        self._mark: torch.cuda.Event | None = None

    @contextmanager
    def use(self, *, after_mark: bool) -> Iterator[None]:
        """Torch's calls in the block run on this stream, if `after_mark` not before the mark.

        This stream runs in order, so all that it does afterwards comes after the mark too.
        """
        mark = self._mark if after_mark else None
        with torch.cuda.stream(self._stream):
            if mark is not None:
                self._stream.wait_event(mark)
            yield

    def event(self) -> torch.cuda.Event:
        """An event that comes when all is done that the caller has queued; in a block of `use`."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def mark(self) -> None:
        """All that the caller, the engine's thread, has queued until now comes first."""
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._index))
        self._mark = event

    def wait_for_mark(self) -> None:
        """Returns when the device has passed the mark; lets go of the GIL."""
        if (mark := self._mark) is not None:
            mark.synchronize()
