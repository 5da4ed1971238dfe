"""The first token of a long prompt that was asked before: computed, or found in each tier."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from time import monotonic, perf_counter
from typing import Final

from benchmarks.support.models import WIDE, random_prompts, save_random
from benchmarks.support.pairs import Spread
from benchmarks.support.tandem_engine import BareCore, request_of
from connector.offload.connector import OffloadConnector
from connector.offload.scheduler import OffloadScheduler
from serving.config import KVTransferConfig, NodeConfig

HEADERS: Final = ("prompt found in", "TTFT, ms", "of the miss")
ARENA_BYTES: Final = 768 << 20
TIER_BYTES: Final = 2 << 30
MISS, ARENA, HOST, DISK = "nothing", "arena", "host tier", "disk tier"


class Asked:
    """One node with one tier; every round asks a new prompt and then asks it again."""

    def __init__(self, core: BareCore, length: int) -> None:
        self._core = core
        self._length = length
        self._seeds = count()
        self._numbers = count()
        self._prompt: Sequence[int] = ()

    def miss(self) -> float:
        """Seconds to the first token of a new prompt."""
        (self._prompt,) = random_prompts(1, self._length, seed=next(self._seeds))
        return self.again()

    def again(self) -> float:
        """Seconds to the first token of the last prompt."""
        self._core.add(request_of(next(self._numbers), self._prompt, 1))
        started = perf_counter()
        self._core.run()
        return perf_counter() - started

    def from_tier(self) -> float:
        """The same after the arena has lost it and the tier has all of it."""
        cache = self._core.scheduler.cache
        self._settle()
        for queue in cache.pool.order.idle:
            while (node := queue.first()) is not None:
                cache.pool.evict(node)
        self._settle()
        before = self._core.scheduler.stats.external_hits
        seconds = self.again()
        found = self._core.scheduler.stats.external_hits - before
        assert found > self._length * 0.9, f"only {found} tokens came from the tier"
        return seconds

    def _settle(self) -> None:
        """Until nothing is on its way to the tier."""
        tiers = self._core.connector.scheduler
        assert isinstance(tiers, OffloadScheduler)
        self._core.core.step()
        while not tiers.writes.is_idle:
            self._core.woken.wait(0.05)
            self._core.woken.clear()
            self._core.core.step()


def measure(
    length: int, rounds: int, done: Callable[[], None], *, until: float
) -> dict[str, list[float]]:
    """Seconds by where the prompt was; the miss and the arena are those of the disk's node."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = save_random(WIDE, folder)
        disk = stack.enter_context(_node(model, length, disk_path=str(folder / "tier")))
        host = stack.enter_context(_node(model, length))

        def of_host() -> float:
            host.miss()
            return host.from_tier()

        # The order stays: each finds what the one before it left.
        ways = {MISS: disk.miss, ARENA: disk.again, DISK: disk.from_tier, HOST: of_host}
        taken: list[dict[str, float]] = []
        began = monotonic()
        while len(taken) < 1 + rounds:
            # One that would hardly end before `until` is left out, but for the first that counts.
            each_s = (monotonic() - began) / max(1, len(taken))
            if len(taken) > 1 and monotonic() + each_s > until:
                break
            taken.append({name: _timed(way, done) for name, way in ways.items()})
        return {name: [each[name] for each in taken[1:]] for name in ways}  # the first warms up


def _timed(way: Callable[[], float], done: Callable[[], None]) -> float:
    seconds = way()
    done()
    return seconds


def rows(results: dict[str, list[float]]) -> list[list[str]]:
    """A line per place, the slowest first."""
    return [
        [
            name,
            Spread.of([1e3 * one for one in results[name]]).show(1),
            Spread.of_ratio(results[name], results[MISS]).show(4),
        ]
        for name in (MISS, DISK, HOST, ARENA)
    ]


@contextmanager
def _node(model: Path, length: int, disk_path: str | None = None) -> Iterator[Asked]:
    tier = {"host_bytes": TIER_BYTES}
    extra = tier if disk_path is None else {"disk_path": disk_path, "disk_bytes": TIER_BYTES}
    config = KVTransferConfig(kv_connector="OffloadConnector", kv_connector_extra_config=extra)
    options = NodeConfig(kv_cache_memory_bytes=ARENA_BYTES, kv_transfer_config=config)
    with BareCore(model, options, OffloadConnector.builder(config)) as core:
        yield Asked(core, length)
