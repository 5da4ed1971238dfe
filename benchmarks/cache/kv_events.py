"""`python -m benchmarks.cache.kv_events`: what KV events cost a step, a publisher and a reader.

One step stores `BLOCKS` hash blocks of 16 tokens, in stretches of 8 and with a checkpoint each, and
removes as many. Beside plain dictionary work on the same hashes, which any index has to do, so the
ratios hold on other machines. Then a real engine under full load, with events and without: the same
steps in alternating rounds, while a process of its own reads the events into an index.
"""

from functools import partial
from timeit import timeit
from typing import Annotated

import typer

from benchmarks.cache import kv_events_load as load
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread, alternate, turns
from benchmarks.support.plots import grouped_bars
from engine.kv_cache.listener import CachedBlocks, CachedStates
from serving.kv_events.event_log import CacheMirror
from serving.kv_events.recorder import AnnouncedGroup, EventRecorder
from serving.kv_events.wire import EventBatch, decode, encode

SECONDS = (240, 45)
QUICK_ROUNDS = 10
BLOCKS, STRETCH, SIZE = 1024, 8, 16
GROUPS = (AnnouncedGroup("full_attention"), AnnouncedGroup("mamba"))
HEADERS = ("part", "us per step", "block events per second", "times plain dictionaries")


def stretch(start: int) -> tuple[CachedBlocks, CachedStates]:
    """A chain of hashes, and a checkpoint at its end."""
    digests = tuple(b"%032d" % number for number in range(start, start + STRETCH))
    end = (start + STRETCH) * SIZE
    blocks = CachedBlocks(0, start * SIZE, end, digests, (0,))
    return blocks, CachedStates((1,), end, digests[-1], (0,))


class Bench:
    """The work of one step at each station, on equal events."""

    def __init__(self) -> None:
        self._stored = [stretch(start) for start in range(0, BLOCKS, STRETCH)]
        self._tokens = tuple(range(150_000, 150_000 + SIZE * STRETCH))
        self._recorder = EventRecorder(GROUPS, SIZE)
        self._mirror = CacheMirror()
        self.record()
        self._batch = EventBatch(0.0, self.events, incarnation="node")
        self._payload = encode(self._batch)

    def record(self) -> None:
        """The engine thread: every call of the cache's listener, and the hand-over."""
        recorder, tokens = self._recorder, self._tokens
        for cached, states in self._stored:
            recorder.stored(cached, cached.digests[0], tokens, cache_salt=None)
            recorder.stored(states, cached.digests[-2], tokens[-SIZE:], cache_salt=None)
        for cached, states in self._stored:
            recorder.removed(cached)
            recorder.removed(states)
        self.events = tuple(recorder.take())

    def mirror(self) -> None:
        """The publisher's thread: the announced state."""
        self._mirror.apply(self._batch.events)

    def encode(self) -> None:
        """The publisher's thread: the bytes."""
        encode(self._batch)

    def decode(self) -> None:
        """A reader: the events."""
        decode(self._payload)

    def dictionaries(self) -> None:
        """The least that an index does: each hash goes in once and out once."""
        table: dict[bytes, int] = {}
        for cached, _ in self._stored:
            for each in cached.digests:
                table[each] = table.get(each, 0) | 1
        for each in list(table):
            del table[each]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the parts.")] = 200,
    engine_rounds: Annotated[int, typer.Option(min=1, help="Rounds of the engine.")] = 15,
    cpu: Annotated[str, typer.Option(help="Core to run on, or `all`.")] = "all",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """The cost of events by parts, and to the steps of an engine."""
    found = report.Report("kv_events", out, SECONDS, cpu=cpu, quick=quick)
    if quick:
        rounds, engine_rounds = QUICK_ROUNDS, 1
    by_part = parts(found, rounds)
    total = 2 * turns(engine_rounds, load.WARMUPS) * len(load.LOADS)
    with report.progress(found.console, total) as describe:
        measured = load.measure(engine_rounds, describe("engine"), until=found.share(1))
    rows = [load.row(name, steps) for name, steps in measured.items()]
    host = machine.describe(found.host)
    note = f"median (lowest-highest) of at most {engine_rounds} rounds; {host}"
    found.publish("Engine steps", headers=load.HEADERS, rows=rows, note=note)
    micros = {name: [taken] for name, taken in by_part.items()}
    grouped_bars(found.plot(), ["one step"], micros, ylabel="us")
    found.save({"parts": by_part, "steps": measured})


def parts(found: report.Report, rounds: int) -> dict[str, Spread]:
    """Recorder, publisher and decoder, each beside plain dictionary work on the same hashes."""
    bench = Bench()
    works = [bench.record, bench.mirror, bench.encode, bench.decode, bench.dictionaries]
    ways = {work.__name__: partial(timeit, work, number=1) for work in works}
    samples = alternate(ways, rounds, until=found.share(2), done=lambda: None)
    plain = samples["dictionaries"]
    events = 2 * (BLOCKS + BLOCKS // STRETCH)
    rows, spreads = [], {}
    for name, taken in samples.items():
        one, ratio = Spread.of(taken).median, Spread.of_ratio(taken, plain).median
        rows.append([name, f"{1e6 * one:,.0f}", f"{events / one:,.0f}", f"{ratio:.2f}"])
        spreads[name] = Spread.of([1e6 * seconds for seconds in taken])
    host = machine.describe(found.host)
    note = f"{events:,} block events a step, median of at most {rounds} rounds; {host}"
    found.publish("KV events", headers=HEADERS, rows=rows, note=note)
    return spreads


if __name__ == "__main__":
    typer.run(main)
