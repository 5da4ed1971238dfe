"""`python -m benchmarks.serving.pauses`: how long a large request makes all others wait.

Real processes on this machine: a prefill node, a decode node and the proxy with the demo model. One
client streams completions through all three and notes every gap between two tokens. Meanwhile
requests that no server should have to bear are sent to the proxy, then to the decode node. All are
built beforehand; who sends them needs little of the cores that all share.

Longest pause: the longest gap of the stream while such a request is under way, beside the longest
without one. Answered: from the first byte that is sent to the answer. RSS: the asked server's own
memory, before and a second after.
"""

import http.client
import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import msgspec
import typer
from rich.console import Console

from benchmarks.support import machine, report
from benchmarks.support.cluster import cluster
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars
from benchmarks.support.processes import Server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
JSON = {"Content-Type": "application/json"}
SECONDS = (240, 30)
LAST_CASE_S = 15.0
QUICK_CASES = ("text of 0.4 MB", "tokenize 0.4 MB")
OUTPUT_TOKENS = 2000
TIMEOUT_S = 120.0
QUIET_S = 2.5
SETTLE_S = 1.0
MB = 1_000_000
HEADERS = ("case", "status", "answered, s", "longest pause, ms", "RSS before, MB", "after")


class Case(msgspec.Struct, frozen=True):
    """A request by its path and the body that `build` makes, sent by `at_once` clients."""

    path: str
    build: Callable[[], bytes]
    at_once: int = 1


class Row(msgspec.Struct, frozen=True):
    """The effect of one case at one server; seconds and bytes."""

    case: str
    statuses: tuple[int, ...]
    answered_s: float
    pause_s: float
    rss: tuple[int, int]


def _text(num_bytes: int) -> str:
    return ("once upon a time " * (num_bytes // 17 + 1))[:num_bytes]


def _prompt(num_bytes: int) -> bytes:
    return msgspec.json.encode({"prompt": _text(num_bytes), "max_tokens": 1})


def _tokenize(num_bytes: int) -> bytes:
    return msgspec.json.encode({"prompt": _text(num_bytes)})


def _chat(num_bytes: int, turns: int = 1) -> bytes:
    messages = [{"role": "user", "content": _text(num_bytes // turns)}] * turns
    return msgspec.json.encode({"messages": messages, "max_tokens": 1})


def _ids(name: str, count: int) -> bytes:
    return b'{"%s":[%s5]}' % (name.encode(), b"5," * (count - 1))


def _keys(count: int) -> bytes:
    return b'{"prompt":[5],%s}' % b",".join(b'"k%d":1' % index for index in range(count))


def _escapes(num_bytes: int) -> bytes:
    return b'{"max_tokens":1,"prompt":"%s"}' % (b"\\u0061" * (num_bytes // 6))


CASES: Mapping[str, Case] = {
    "text of 30 MB": Case(COMPLETIONS, lambda: _prompt(30 * MB)),
    "text of 15 MB": Case(COMPLETIONS, lambda: _prompt(15 * MB)),
    "8 texts of 15 MB at once": Case(COMPLETIONS, lambda: _prompt(15 * MB), 8),
    "text of 15 MB, escaped": Case(COMPLETIONS, lambda: _escapes(15 * MB)),
    "text of 0.4 MB": Case(COMPLETIONS, lambda: _prompt(400_000)),
    "8 texts of 0.4 MB at once": Case(COMPLETIONS, lambda: _prompt(400_000), 8),
    "chat of 15 MB": Case(CHAT, lambda: _chat(15 * MB)),
    "chat of 350,000 turns": Case(CHAT, lambda: _chat(350_000, 350_000)),
    "7 million ids": Case(COMPLETIONS, lambda: _ids("prompt", 7 * MB)),
    "900,000 ids": Case(COMPLETIONS, lambda: _ids("prompt", 900_000)),
    "1 million keys": Case(COMPLETIONS, lambda: _keys(MB)),
    "tokenize 30 MB": Case(TOKENIZE, lambda: _tokenize(30 * MB)),
    "tokenize 0.4 MB": Case(TOKENIZE, lambda: _tokenize(400_000)),
    "detokenize 7 million ids": Case(DETOKENIZE, lambda: _ids("tokens", 7 * MB)),
}


@dataclass(slots=True)
class Stream:
    """Completions, one after the other, from a thread of its own; when their tokens came."""

    url: str
    gaps: list[tuple[float, float]] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    def longest(self, start: float, end: float) -> float:
        """The longest gap between two tokens that was not over at `start`, nor begun at `end`.

        0 where one completion had ended and the next had no token yet.
        """
        gaps = (end_of - begin for begin, end_of in self.gaps if end_of > start and begin < end)
        return max(gaps, default=0.0)

    def run(self) -> None:
        """Until `stop`."""
        while not self._stop.is_set():
            self._complete()

    def stop(self) -> None:
        """The thread ends with the next token."""
        self._stop.set()

    def _complete(self) -> None:
        body = {"prompt": "Once", "max_tokens": OUTPUT_TOKENS, "ignore_eos": True, "stream": True}
        with _connection(self.url) as connection:
            connection.request("POST", COMPLETIONS, msgspec.json.encode(body), JSON)
            lines = itertools.takewhile(lambda _: not self._stop.is_set(), connection.getresponse())
            times = (time.perf_counter() for line in lines if line.startswith(b"data: {"))
            for gap in itertools.pairwise(times):
                self.gaps.append(gap)


@contextmanager
def _connection(url: str) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=TIMEOUT_S)
    try:
        yield connection
    finally:
        connection.close()


def post(url: str, path: str, body: bytes) -> int:
    """Status of the answer, also of one that comes before the whole body is sent."""
    with _connection(url) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.request("POST", path, body, JSON)
        try:
            return connection.getresponse().status
        except (OSError, http.client.HTTPException):
            return 0


def attack(name: str, case: Case, server: Server, *, stream: Stream) -> Row:
    """One case at one server, while `stream` goes on."""
    body, url = case.build(), server.url()
    before = server.rss()
    started = time.perf_counter()
    with ThreadPoolExecutor(case.at_once) as pool:
        asked = [pool.submit(post, url, case.path, body) for _ in range(case.at_once)]
        statuses = [one.result() for one in asked]
    answered = time.perf_counter() - started
    time.sleep(SETTLE_S)
    pause = stream.longest(started, started + answered)
    return Row(name, tuple(sorted(set(statuses))), answered, pause, (before, server.rss()))


@contextmanager
def _streaming(url: str) -> Iterator[Stream]:
    stream = Stream(url)
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(stream.run)
        try:
            yield stream
        finally:
            stream.stop()
            running.result()


def run(
    model: str,
    flags: list[str],
    cases: Mapping[str, Case],
    *,
    console: Console,
    until: float = math.inf,
) -> list[Row]:
    """All cases at the proxy and at the decode node, and the longest pause without any.

    Those that would begin after `until` (monotonic) are left out.
    """
    with cluster(Path(model), *flags) as up, _streaming(up.proxy) as stream:
        _, d, proxy = up.servers
        return _rows({"proxy": proxy, "D": d}, stream, cases, console=console, until=until)


def _rows(
    servers: Mapping[str, Server],
    stream: Stream,
    cases: Mapping[str, Case],
    *,
    console: Console,
    until: float,
) -> list[Row]:
    time.sleep(QUIET_S)
    started = time.perf_counter()
    time.sleep(QUIET_S)
    quiet = stream.longest(started, time.perf_counter())
    rows = [
        Row(f"{where}, nothing else", (), 0.0, quiet, (server.rss(), server.rss()))
        for where, server in servers.items()
    ]
    with report.progress(console, len(servers) * len(cases)) as describe:
        for where, name in itertools.product(servers, cases):
            if time.monotonic() > until:
                break
            done = describe(f"{where}: {name}")
            rows.append(attack(f"{where}, {name}", cases[name], servers[where], stream=stream))
            done()
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    return [
        row.case,
        ", ".join(map(str, row.statuses)),
        f"{row.answered_s:.2f}",
        f"{1e3 * row.pause_s:.0f}",
        *(f"{nbytes / MB:,.0f}" for nbytes in row.rss),
    ]


def main(
    *,
    model: Annotated[str, typer.Option(help="Model folder. [the demo's]")] = str(DEMO_MODEL),
    max_model_len: Annotated[int | None, typer.Option(help="Context. [the model's]")] = None,
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """The longest pause of a stream while large requests come, at the proxy and at a node."""
    found = report.Report("pauses", out, SECONDS, cpu="all", quick=quick)
    flags = [] if max_model_len is None else ["--max-model-len", str(max_model_len)]
    cases = {name: CASES[name] for name in QUICK_CASES} if quick else CASES
    # No case begins in the last part of the time: the longest one must still end in it.
    rows = run(model, flags, cases, console=found.console, until=found.ends_at - LAST_CASE_S)
    context = max_model_len or "the model's"
    left = 2 * (len(cases) + 1) - len(rows)
    note = f"{left} cases left out for want of time; " if left else ""
    note += f"context {context}; three servers and the client share {machine.describe(found.host)}"
    found.publish("Pauses", headers=HEADERS, rows=list(map(cells, rows)), note=note)
    labels = [row.case for row in rows]
    bars = {"longest pause": [Spread.of([1e3 * row.pause_s]) for row in rows]}
    grouped_bars(found.plot(), labels, bars, ylabel="ms")
    found.save(rows)


if __name__ == "__main__":
    typer.run(main)
