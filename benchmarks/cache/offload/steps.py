"""The engine's step beside a tier: idle, and while it loads as fast as it can.

idle     decode steps of one engine with a host tier, and of one without any connector
busy     decode steps while a reader loads from a tier into another arena without pause; beside
         them steps while a thread copies the same bytes with a plain `copy_`
"""

import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.cache.offload.copies import Bench
from benchmarks.support.models import random_prompts, save_random
from benchmarks.support.pairs import Spread, Way, alternate, share
from benchmarks.support.tandem_engine import BareCore, request_of
from connector.offload.connector import OffloadConnector
from serving.config import KVTransferConfig, NodeConfig

HEADERS: Final = ("tier", "step, ms", "beside it", "step, ms", "ratio")
ARENA_BYTES: Final = 256 << 20
BATCH, PROMPT, TOKENS = 8, 256, 48
WARMUPS: Final = 2
COPIED_BYTES: Final = 128 << 20
ITEM_BYTES: Final = 256 << 10


class Engine:
    """One engine; every call decodes other prompts."""

    def __init__(self, core: BareCore) -> None:
        self._core = core
        self._seeds = count()

    def step(self) -> float:
        """Mean seconds of a decode step."""
        prompts = random_prompts(BATCH, PROMPT, seed=next(self._seeds))
        for number, prompt in enumerate(prompts):
            self._core.add(request_of(number, prompt, TOKENS))
        while self._core.scheduler.num_waiting_tokens or self._core.scheduler.num_waiting:
            self._core.core.step()
        steps, started = 0, perf_counter()
        while self._core.scheduler.has_work:
            self._core.core.step()
            steps += 1
        return (perf_counter() - started) / steps


def measure(
    rounds: int, done: Callable[[str], Callable[[], None]], *, until: float
) -> list[list[str]]:
    """The rows of the table; rounds after `until` (monotonic) are left out."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = save_random("gdn", folder)
        without, idle = (stack.enter_context(_engine(model, tier)) for tier in (False, True))
        (folder / "files").mkdir()
        bench = Bench(ITEM_BYTES, COPIED_BYTES, folder / "files")
        stack.callback(bench.close)
        plain = partial(_beside, bench.copy, without.step)
        cases: dict[str, tuple[str, Way[float], Way[float]]] = {
            "host, idle": ("no connector", idle.step, without.step),
            "host, loads": ("a thread that copies", partial(_beside, bench.load, idle.step), plain),
            "disk, loads": (
                "a thread that copies",
                partial(_beside, partial(bench.read_items, verify=True, cold=False), idle.step),
                plain,
            ),
        }
        rows: list[list[str]] = []
        for name, (other, way, plain_way) in cases.items():
            ends_at, told = share(until, len(cases) - len(rows)), done(name)
            both = {name: way, other: plain_way}
            took = alternate(both, rounds, warmups=WARMUPS, until=ends_at, done=told)
            speeds = [Spread.of([1e3 * one for one in took[each]]).show() for each in (name, other)]
            ratio = Spread.of_ratio(took[name], took[other]).show(3)
            rows.append([name, speeds[0], other, speeds[1], ratio])
        return rows


def _beside(work: Callable[[], object], step: Callable[[], float]) -> float:
    """A step's seconds while another thread does `work` again and again."""
    is_over = threading.Event()

    def repeat() -> None:
        while not is_over.is_set():
            work()

    thread = threading.Thread(target=repeat)
    thread.start()
    try:
        return step()
    finally:
        is_over.set()
        thread.join()


@contextmanager
def _engine(model: Path, tier: bool) -> Iterator[Engine]:
    config = KVTransferConfig(
        kv_connector="OffloadConnector", kv_connector_extra_config={"host_bytes": 512 << 20}
    )
    options = NodeConfig(kv_cache_memory_bytes=ARENA_BYTES)
    with BareCore(model, options, OffloadConnector.builder(config) if tier else None) as core:
        yield Engine(core)
