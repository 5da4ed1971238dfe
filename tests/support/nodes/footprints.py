"""The files of the product whose functions run while something goes its way."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.source_tree import ROOT


class Footprints:
    """The product's files whose functions run in threads that `watched` sees."""

    def __init__(self) -> None:
        self._is_on = False
        self._files: set[str] = set()

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        if self._is_on and event == "call":
            self._files.add(frame.f_code.co_filename)

    @contextmanager
    def on(self) -> Iterator[set[str]]:
        """The files of what runs inside the block; complete when it ends."""
        found: set[str] = set()
        self._files.clear()
        self._is_on = True
        try:
            yield found
        finally:
            self._is_on = False
            paths = (Path(name) for name in self._files)
            inside = (path for path in paths if path.is_relative_to(ROOT))
            found.update(path.relative_to(ROOT).as_posix() for path in inside)


@contextmanager
def watched() -> Iterator[Footprints]:
    """Threads that start inside the block are seen, and the one that enters it."""
    made = Footprints()
    threading.setprofile(made)
    sys.setprofile(made)
    try:
        yield made
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
