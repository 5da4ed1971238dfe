"""The start scan of the disk tier's folder: headers of many files, read one after the other.

Beside it the plainest thing that could be done: the names and sizes of the same files.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.support.pairs import Spread, alternate
from connector.offload.messages import Item
from connector.offload.metrics import OffloadStats
from connector.offload.tiers.folder import Folder
from connector.offload.tiers.tier_file import Files, Header, encode

HEADERS: Final = ("files", "scan, ms", "listing, ms", "µs per file")
GEOMETRY: Final = "0123456789abcdef"
ITEMS_PER_FILE: Final = 32
CHUNK: Final = 16
ITEM_BYTES: Final = 64  # the scan does not read them


def measure(
    num_files: int, rounds: int, done: Callable[[str], Callable[[], None]], *, until: float
) -> list[list[str]]:
    """The row of a folder of `num_files` files; all of it is in the page cache."""
    with tempfile.TemporaryDirectory() as place:
        files = Files(Path(place))
        _fill(files, num_files)
        ways = {"scan": lambda: _scan(files, num_files), "listing": lambda: _seconds(files.scan)}
        took = alternate(ways, rounds, until=until, done=done("scan"))
    scan, listing = (Spread.of([1e3 * one for one in took[way]]).show() for way in ways)
    each = Spread.of([1e6 * one / num_files for one in took["scan"]]).show(0)
    return [[f"{num_files:,}", scan, listing, each]]


def _fill(files: Files, num_files: int) -> None:
    items = tuple(
        Item(0, first, first + CHUNK, bytes(32), (bytes(32),))
        for first in range(0, CHUNK * ITEMS_PER_FILE, CHUNK)
    )
    offsets = tuple(range(0, ITEM_BYTES * ITEMS_PER_FILE, ITEM_BYTES))
    sizes, digests = (ITEM_BYTES,) * ITEMS_PER_FILE, (1 << 63,) * ITEMS_PER_FILE
    head = memoryview(encode(Header(GEOMETRY, items, offsets, sizes, digests)))
    data = memoryview(bytes(ITEM_BYTES * ITEMS_PER_FILE))
    namer = Folder(files, lambda: GEOMETRY, 1, stats=OffloadStats())
    for _ in range(num_files):
        files.write(namer.new_name(), (head, data))


def _scan(files: Files, num_files: int) -> float:
    folder = Folder(files, lambda: GEOMETRY, 1 << 60, stats=OffloadStats())
    started = perf_counter()
    num_found = sum(1 for _ in folder.rescan())
    seconds = perf_counter() - started
    if num_found != num_files:
        raise RuntimeError(f"the scan found {num_found} of {num_files} files")
    return seconds


def _seconds(work: Callable[[], object]) -> float:
    started = perf_counter()
    work()
    return perf_counter() - started
