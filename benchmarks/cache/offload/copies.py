"""Bytes per second between arena and tiers, beside a plain copy and a plain read of as many bytes.

    host     `ArenaItems`, scattered blocks of the arena <-> slots of the host tier; beside it one
             `copy_` between two tensors
    disk     a whole `LoadJob`: read, verify or not, copy to scattered blocks; beside it one
             `preadv` of each of the same files into a buffer, without any use of the bytes

One thread each; all ways by turns in every round. Cold: the page cache has lost the files.
"""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Final

import torch
import xxhash

from benchmarks.support.pairs import Spread, Way, alternate, share
from connector.offload.chunk_plan import ChunkPlan
from connector.offload.messages import FileRange, Item, LoadPart, Place, TierLoad
from connector.offload.metrics import OffloadStats
from connector.offload.tiers.arena_items import ArenaItems
from connector.offload.tiers.folder import Folder
from connector.offload.tiers.load_job import LoadJob
from connector.offload.tiers.tier_file import Files
from engine.arena import ArenaMemory
from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup

HEADERS: Final = ("item", "way", "GB/s", "plain, GB/s", "ratio")
BLOCK: Final = 16
FILE_BYTES: Final = 8 << 20
NO_DEADLINE: Final = 1e12
PLAIN: Final = "plain"


class Bench:
    """`num_bytes` in items of `item_bytes`, once in scattered blocks of an arena, once dense."""

    def __init__(self, item_bytes: int, num_bytes: int, folder: Path) -> None:
        spec = FullAttentionSpec(
            num_kv_heads=1, head_dim=item_bytes // BLOCK // 2 // 4, dtype="float32"
        )
        plan: ArenaPlan = plan_arena(
            (KVCacheGroup(spec, (0,)),), BLOCK, num_bytes + (64 << 20), hash_block_size=BLOCK
        )
        self.chunks = ChunkPlan(plan)
        self.arena, self.host = ArenaMemory(plan.arena_bytes), ArenaMemory(num_bytes)
        self.other = ArenaMemory(num_bytes)
        self.items = ArenaItems(self.chunks, self.arena)
        self.num_bytes, self._size = num_bytes, self.chunks.nbytes(self._item(0))
        for memory in (self.arena, self.host, self.other):
            memory.tensor.random_(0, 255)  # every page is there, and none is another's
        blocks = list(range(1, num_bytes // self._size + 1))
        Random(7).shuffle(blocks)
        self.packed = [
            (self._item(number), Place((block,)), number * self._size)
            for number, block in enumerate(blocks)
        ]
        self.folder = Folder(Files(folder), lambda: "0" * 32, 1 << 40, stats=OffloadStats())
        self._parts = tuple(self._write_files())
        self._files = sorted(folder.iterdir())
        self._loads = count()

    def save(self) -> float:
        """Seconds; arena to host tier."""
        return _seconds(lambda: self.items.pack(self.packed, self.host.tensor))

    def load(self) -> float:
        """Seconds; host tier to arena."""
        return _seconds(lambda: self.items.unpack(self.packed, self.host.tensor))

    def copy(self) -> float:
        """Seconds; one copy of all bytes."""
        return _seconds(lambda: self.other.tensor.copy_(self.host.tensor))

    def read_items(self, *, verify: bool, cold: bool) -> float:
        """Seconds; files to arena."""
        self._forget(cold)
        job = LoadJob(TierLoad(next(self._loads), "bench", self._parts), NO_DEADLINE)
        seconds = _seconds(lambda: job.run(self.items, self.host, self.folder, verify=verify))
        assert job.end("error") is None
        return seconds

    def read_plain(self, *, cold: bool) -> float:
        """Seconds; the same files, each to its part of a buffer."""
        self._forget(cold)
        return _seconds(self._read_plain)

    def close(self) -> None:
        """Frees the memory."""
        for memory in (self.arena, self.host, self.other):
            memory.close()

    def _item(self, number: int) -> Item:
        start = number * BLOCK
        return Item(0, start, start + BLOCK, number.to_bytes(32, "big"), (b"",))

    def _write_files(self) -> Iterator[LoadPart]:
        content = self.host.tensor.numpy().data
        per_file = max(1, FILE_BYTES // self._size)
        for first in range(0, len(self.packed), per_file):
            some = self.packed[first : first + per_file]
            name, start = self.folder.new_name(), some[0][2]
            self.folder.files.write(name, (content[start : start + len(some) * self._size],))
            for item, place, offset in some:
                digest = xxhash.xxh3_64_intdigest(content[offset : offset + self._size])
                found = FileRange(name, offset - start, self._size, digest)
                yield LoadPart(item, place, found)

    def _read_plain(self) -> None:
        content = self.other.tensor.numpy().data
        start = 0
        for path in self._files:
            file = os.open(path, os.O_RDONLY)
            start += os.preadv(file, [content[start : start + FILE_BYTES]], 0)
            os.close(file)
        assert start == self.num_bytes

    def _forget(self, cold: bool) -> None:
        if not cold:
            return
        for found in self._files:
            file = os.open(found, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure(
    sizes: list[int],
    num_bytes: int,
    rounds: int,
    *,
    until: float,
    done: Callable[[str], Callable[[], None]],
) -> list[list[str]]:
    """The rows of the table: every size, every way beside its plain one.

    `until` is monotonic: later rounds than that are left out.
    """
    rows = []
    for number, size in enumerate(sizes):
        with _bench(size, num_bytes) as bench:
            by_label = _ways(bench)
            left = len(by_label) * (len(sizes) - number)
            for label, ways in by_label.items():
                told = done(f"{label}, items of {size >> 10} KiB")
                took = alternate(ways, rounds, until=share(until, left), done=told)
                left -= 1
                plain = [num_bytes / 1e9 / one for one in took.pop(PLAIN)]
                rates = {
                    f"{label}, {name}": [num_bytes / 1e9 / one for one in seconds]
                    for name, seconds in took.items()
                }
                rows += [[f"{size >> 10} KiB", *_cells(way, rates[way], plain)] for way in rates]
    return rows


def _cells(way: str, rates: list[float], plain: list[float]) -> list[str]:
    speeds = [Spread.of(each).show() for each in (rates, plain)]
    return [way, *speeds, Spread.of_ratio(rates, plain).show()]


def _ways(bench: Bench) -> dict[str, dict[str, Way[float]]]:
    ways: dict[str, dict[str, Way[float]]] = {
        "host": {"save": bench.save, "load": bench.load, PLAIN: bench.copy}
    }
    for label, cold in (("disk, cold", True), ("disk, in the page cache", False)):
        ways[label] = {
            "load": partial(bench.read_items, verify=False, cold=cold),
            "load, verified": partial(bench.read_items, verify=True, cold=cold),
            PLAIN: partial(bench.read_plain, cold=cold),
        }
    return ways


@contextmanager
def _bench(size: int, num_bytes: int) -> Iterator[Bench]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(size, num_bytes, folder)
        stack.callback(bench.close)
        yield bench


def _seconds(call: Callable[[], object]) -> float:
    torch.set_num_threads(1)
    started = perf_counter()
    call()
    return perf_counter() - started
