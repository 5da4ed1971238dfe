"""`python -m benchmarks.serving.proxy_cost.members`: what many nodes take of a proxy.

Per number of nodes one proxy, half P and half D in two processes (`crowd.py`), which register,
answer at once and publish KV events; this process is the client, with an open loop of requests.
Counted is all CPU of the proxy's process: from that of a proxy at rest without nodes, idle figures
per node are the difference. Latency is from the moment a request is due to its answer's end.
"""

import asyncio
import random
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated
from urllib.error import URLError
from urllib.request import Request, urlopen

import aiohttp
import msgspec
import typer
import uvloop

from benchmarks.serving.proxy_cost.load import HEADERS, MAX_TOKEN_ID, PATH, Target
from benchmarks.serving.proxy_cost.loopback import HOST
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import grouped_bars
from benchmarks.support.processes import ctrl_c_later, launch, processes

SECONDS = (300, 60)
NODES, QUICK_NODES = (8, 16, 32, 64), (2,)
APART_NODES, QUICK_APART_NODES = 32, 2
ROUNDS, QUICK_ROUNDS = 5, 1
WINDOW_S, QUICK_WINDOW_S = 3.0, 0.5
SETTLE_S = 2.0
"""From the last canary to the first figure."""
NEW_TOKENS = 4
SHARED_TOKENS, OWN_TOKENS, NUM_SHARED = 64, 32, 16
"""A prompt: one of some beginnings, and an end of its own."""
JOIN_S = 60.0
POLL_S = 0.05
ANSWER_S = 10.0
CROWD = "benchmarks.serving.proxy_cost.crowd"
HEADERS_LOAD = (
    "nodes",
    "all serve after, s",
    "requests/s",
    "failed",
    "p50, ms",
    "p99, ms",
    "CPU ms/request",
    "without idle",
    "idle, CPU ms/s",
    "per node",
)
HEADERS_IDLE = ("the proxy knows", "CPU ms/s", "per node")


class Load(msgspec.Struct, frozen=True):
    """Milliseconds of the answers of one window, those that failed, and the proxy's CPU seconds."""

    latencies_ms: list[float]
    num_failed: int
    seconds: float
    cpu_s: float

    @property
    def cpu_ms_per_request(self) -> float:
        return self.cpu_ms_beyond(0.0)

    def cpu_ms_beyond(self, idle: float) -> float:
        """Per request, without the milliseconds per second that an idle proxy takes as well."""
        return (1e3 * self.cpu_s - idle * self.seconds) / max(1, len(self.latencies_ms))


class Case(msgspec.Struct, frozen=True):
    """One number of nodes: CPU milliseconds per second at rest, and the windows under load."""

    num_nodes: int
    joined_s: float
    idle: list[float]
    loads: list[Load]

    @property
    def num_failed(self) -> int:
        return sum(it.num_failed for it in self.loads)

    def row(self, at_rest: float) -> list[str]:
        """One line of the table; `at_rest`: CPU of a proxy without nodes."""
        every = sorted(ms for it in self.loads for ms in it.latencies_ms)
        reached = Spread.of([len(it.latencies_ms) / it.seconds for it in self.loads])
        idle = Spread.of(self.idle)
        return [
            str(self.num_nodes),
            f"{self.joined_s:.1f}",
            reached.show(0),
            str(self.num_failed),
            *(f"{every[int(share * (len(every) - 1))]:.1f}" for share in (0.5, 0.99)),
            Spread.of([it.cpu_ms_per_request for it in self.loads]).show(),
            Spread.of([it.cpu_ms_beyond(idle.median) for it in self.loads]).show(),
            idle.show(1),
            f"{(idle.median - at_rest) / self.num_nodes:.2f}",
        ]


class Crowds:
    """A proxy and the nodes that may join it."""

    def __init__(self, proxy: Target, crowds: Sequence[str], num_nodes: int) -> None:
        self.proxy = proxy
        self.num_nodes = num_nodes
        self._crowds = crowds

    def case(self, rate: int, rounds: int, window_s: float) -> Case:
        """All register; then figures at rest and under load, `rounds` windows each."""
        joined_s = self.join()
        idle = self.idle(rounds, window_s)
        loads = [under_load(self.proxy, rate, window_s, seed=it) for it in range(rounds + 1)]
        # The first one opens connections.
        return Case(self.num_nodes, joined_s, idle, loads[1:])

    def join(self) -> float:
        """Seconds until all nodes that are told to register serve."""
        self._until(lambda stages: stages == [])
        began = time.monotonic()
        for url in self._crowds:
            with urlopen(Request(f"{url}/join", self.proxy.url.encode()), timeout=ANSWER_S):
                pass
        self.until_all_serve()
        return time.monotonic() - began

    def until_all_serve(self) -> None:
        """Raises RuntimeError when they do not in time."""
        self._until(lambda stages: stages == ["serving"] * self.num_nodes)

    def idle(self, rounds: int, window_s: float) -> list[float]:
        """CPU milliseconds per second in each of `rounds` windows without a request."""
        time.sleep(SETTLE_S)
        found = []
        for _ in range(rounds):
            began, before = time.monotonic(), self.proxy.cpu_s()
            time.sleep(window_s)
            spent = self.proxy.cpu_s() - before
            found.append(1e3 * spent / (time.monotonic() - began))
        return found

    def _until(self, is_reached: Callable[[list[str]], bool]) -> None:
        deadline = time.monotonic() + JOIN_S
        while not is_reached(stages := self._stages()):
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.num_nodes} nodes are not where they should be: {stages}")
            time.sleep(POLL_S)

    def _stages(self) -> list[str]:
        try:
            with urlopen(f"{self.proxy.url}/status", timeout=ANSWER_S) as reply:
                return [node["stage"] for node in msgspec.json.decode(reply.read())["nodes"]]
        except URLError as error:
            return [str(error)]


def main(
    *,
    rate: Annotated[int, typer.Option(help="Requests per second.", min=1)] = 100,
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """CPU of the proxy per request and per node, for 8 to 64 nodes that register."""
    found = report.Report("members", out, SECONDS, cpu="all", quick=quick)
    rounds, window_s = (QUICK_ROUNDS, QUICK_WINDOW_S) if quick else (ROUNDS, WINDOW_S)
    counts, apart = (QUICK_NODES, QUICK_APART_NODES) if quick else (NODES, APART_NODES)
    cases: list[Case] = []
    idle: dict[str, Spread] = {}
    with (
        tempfile.TemporaryDirectory() as name,
        report.progress(found.console, 3 + len(counts)) as describe,
    ):
        folder = Path(name)
        for what, num_nodes, joins in (
            ("no node", 0, False),
            (f"{apart} nodes by its options", apart, False),
            (f"{apart} that register", apart, True),
        ):
            done = describe(what)
            with crowds(folder, num_nodes, "silent", joins=joins) as these:
                these.join() if joins else these.until_all_serve()
                idle[what] = Spread.of(these.idle(rounds, window_s))
            done()
        for num_nodes in counts:
            done = describe(f"{num_nodes} nodes")
            with crowds(folder, num_nodes) as these:
                cases.append(these.case(rate, rounds, window_s))
            done()
    at_rest = next(case.idle for case in cases if case.num_nodes == apart)
    idle[f"{apart} that register and publish"] = Spread.of(at_rest)
    empty = idle["no node"].median
    rows = [case.row(empty) for case in cases]
    note = f"{rate} requests/s due, {rounds} windows of {window_s:g} s; "
    note += machine.describe(found.host)
    found.publish("Many nodes", headers=HEADERS_LOAD, rows=rows, note=note)
    rows = [
        [name, it.show(1), f"{(it.median - empty) / apart:.2f}" if it.median != empty else ""]
        for name, it in idle.items()
    ]
    found.publish("Nodes at rest", headers=HEADERS_IDLE, rows=rows, note="KV events: none happen")
    bars = {"proxy": [Spread.of([it.cpu_ms_per_request for it in c.loads]) for c in cases]}
    labels = [f"{case.num_nodes} nodes" for case in cases]
    grouped_bars(found.plot(), labels, bars, ylabel="CPU ms per request")
    found.save({"cases": cases, "idle": idle})
    if any(case.num_failed for case in cases):
        raise typer.Exit(1)


@contextmanager
def crowds(folder: Path, num_nodes: int, *words: str, joins: bool = True) -> Iterator[Crowds]:
    """A proxy and `num_nodes` nodes, half P, which it knows by its options unless they join."""
    kinds = ("prefill", "decode") if num_nodes else ()
    with ExitStack() as stack:
        commands = [(CROWD, kind, str(num_nodes // 2), *words) for kind in kinds]
        urls = [it.url() for it in stack.enter_context(processes(folder, *commands))]
        flags = ["--grpc-port", "0"]
        for kind, url in zip(kinds, () if joins else urls, strict=False):
            with urlopen(f"{url}/nodes", timeout=ANSWER_S) as reply:
                nodes = msgspec.json.decode(reply.read())
            flags += [word for node in nodes for word in (f"--{kind}", node)]
        with socket.create_server((HOST, 0)) as free:
            port = free.getsockname()[1]
        # It says where it serves once a node is there, which comes later.
        with ctrl_c_later():
            proxy = launch(("proxy", "--port", str(port), *flags), folder / "proxy.log")
            stack.callback(proxy.stop)
        yield Crowds(Target(f"http://{HOST}:{port}", proxy.process.pid), urls, num_nodes)


def under_load(proxy: Target, rate: int, seconds: float, *, seed: int) -> Load:
    """Sends `rate` requests per second for so long, whether or not answers come.

    Prompts of another `seed` are others, or nodes would have no new block to tell of.
    """
    draw = random.Random(seed)
    beginnings = [_tokens(draw, SHARED_TOKENS) for _ in range(NUM_SHARED)]
    bodies = [
        msgspec.json.encode(
            {
                "prompt": draw.choice(beginnings) + _tokens(draw, OWN_TOKENS),
                "max_tokens": NEW_TOKENS,
            }
        )
        for _ in range(int(rate * seconds))
    ]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_send_all(proxy, bodies, rate))


async def _send_all(proxy: Target, bodies: Sequence[bytes], rate: int) -> Load:
    # uvloop's own clock has whole milliseconds.
    clock = time.monotonic
    latencies: list[float] = []

    async def send(body: bytes, due: float) -> bool:
        try:
            async with session.post(PATH, data=body) as reply:
                choices = msgspec.json.decode(await reply.read())["choices"]
        except (aiohttp.ClientError, TimeoutError):
            return False
        latencies.append(1e3 * (clock() - due))
        return bool(choices[0]["text"])

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=ANSWER_S)
    async with aiohttp.ClientSession(
        proxy.url, headers=HEADERS, connector=connector, timeout=timeout, raise_for_status=True
    ) as session:
        began, before, tasks = clock(), proxy.cpu_s(), []
        for number, body in enumerate(bodies):
            due = began + number / rate
            await asyncio.sleep(due - clock())
            tasks.append(asyncio.create_task(send(body, due)))
        worked = await asyncio.gather(*tasks)
        seconds = clock() - began
    return Load(latencies, worked.count(False), seconds, proxy.cpu_s() - before)


def _tokens(draw: random.Random, count: int) -> list[int]:
    return [draw.randrange(MAX_TOKEN_ID) for _ in range(count)]


if __name__ == "__main__":
    typer.run(main)
