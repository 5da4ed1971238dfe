"""A real engine under full load, with and without KV events; their reader has its own process."""

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from time import perf_counter, process_time, thread_time
from typing import Final, NamedTuple

import torch

from benchmarks.support.models import random_prompts, save_random
from benchmarks.support.pairs import Spread, alternate, share
from benchmarks.support.tandem_engine import BareCore, request_of
from proxy.routing.prefix_index import PrefixIndex
from serving.config import KVEventsConfig, NodeConfig
from serving.kv_events.follower import EventSource
from serving.kv_events.subscriber import EventSubscriber
from serving.rpc.messages import KVEventsInfo

HEADERS: Final = (
    "load",
    "step, ms",
    "with events",
    "ratio by the clock",
    "on the CPU",
    "threads beside the engine's",
)
ARENA_BYTES: Final = 48 << 20
"""Small enough that it is full after the first rounds: each block stored is another one removed."""
LOADS: Final = {"decode, 32 at once": (32, 16, 48), "prefill, 2,048 tokens": (1, 2048, 1)}
"""Requests, tokens in, tokens out."""
WARMUPS: Final = 3
JOIN_S: Final = 30.0


class StepTime(NamedTuple):
    """Seconds by the clock, and on the CPU: in all threads, and in those beside the engine's."""

    clock: float
    cpu: float
    beside: float


class Engine:
    """One bare core that computes other prompts in every round; `seeds` are its rounds."""

    def __init__(self, core: BareCore) -> None:
        self._core = core
        self._seeds = count()

    def run(self, requests: int, prompt: int, tokens: int) -> StepTime:
        """The mean step, from the first to the last of these requests."""
        for number, ids in enumerate(random_prompts(requests, prompt, seed=next(self._seeds))):
            self._core.add(request_of(number, ids, tokens))
        steps, before = 0, (perf_counter(), process_time(), thread_time())
        while self._core.scheduler.has_work:
            self._core.core.step()
            steps += 1
        after = (perf_counter(), process_time(), thread_time())
        clock, cpu, own = ((end - start) / steps for start, end in zip(before, after, strict=True))
        return StepTime(clock, cpu, cpu - own)


def measure(
    rounds: int, done: Callable[[], None], *, until: float
) -> dict[str, dict[str, list[StepTime]]]:
    """By load the steps by round, with events `off` and `on`, until `until` (monotonic)."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        checkpoint = save_random("gdn", folder)
        engines = {
            name: Engine(stack.enter_context(_core(checkpoint, publishes=publishes)))
            for name, publishes in (("off", False), ("on", True))
        }
        results = {}
        for number, (load, sizes) in enumerate(LOADS.items()):
            ends_at = share(until, len(LOADS) - number)
            ways = {name: partial(engine.run, *sizes) for name, engine in engines.items()}
            results[load] = alternate(ways, rounds, warmups=WARMUPS, until=ends_at, done=done)
    return results


def row(load: str, steps: Mapping[str, Sequence[StepTime]]) -> list[str]:
    """One line of the table."""
    off, on = steps["off"], steps["on"]
    clock = [[step.clock for step in each] for each in (off, on)]
    cpu = [[step.cpu for step in each] for each in (off, on)]
    beside = Spread.of([100 * step.beside / step.cpu for step in on])
    return [
        load,
        *(f"{1e3 * Spread.of(each).median:.1f}" for each in clock),
        Spread.of_ratio(clock[1], clock[0]).show(3),
        Spread.of_ratio(cpu[1], cpu[0]).show(3),
        f"{beside.show()} %",
    ]


@contextmanager
def _core(checkpoint: Path, *, publishes: bool) -> Iterator[BareCore]:
    options = NodeConfig(
        max_num_seqs=32,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=ARENA_BYTES,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=publishes),
    )
    with ExitStack() as stack:
        core = stack.enter_context(BareCore(checkpoint, options))
        if core.events is not None and core.events.info is not None:
            stack.enter_context(_reader(core.events.info))
        yield core


@contextmanager
def _reader(info: KVEventsInfo) -> Iterator[None]:
    """A process that follows the events into an index, as a proxy does."""
    spawn = multiprocessing.get_context("spawn")
    is_synced, is_over = spawn.Event(), spawn.Event()
    process = spawn.Process(target=_follow, args=(info, is_synced, is_over), daemon=True)
    process.start()
    try:
        if not is_synced.wait(JOIN_S):
            raise RuntimeError("the reader of the events does not run")
        yield
    finally:
        is_over.set()
        process.join(JOIN_S)
        process.kill()


def _follow(info: KVEventsInfo, is_synced: Event, is_over: Event) -> None:
    torch.set_num_threads(1)
    index = PrefixIndex()
    index.set_node("node", info)
    subscriber = EventSubscriber(index)
    subscriber.add("node", EventSource(info.endpoint, info.replay_endpoint, info.topic))
    while not is_over.is_set():
        if subscriber.stats("node").is_synced:
            is_synced.set()
        time.sleep(0.2)
    subscriber.close()
