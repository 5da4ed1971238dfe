"""`python -m benchmarks.serving`: TTFT, ITL and throughput as the official OpenAI client sees them.

Real processes on this machine: a prefill node, a decode node and the proxy, and beside them one
node that does both. Rounds of the same requests alternate between the proxy and the single node;
the one that is not asked idles. The client streams completions of the demo model's own kind of
text, greedily and to full length, with `concurrency` requests under way all the time.

TTFT: from sending a request to its first chunk. ITL: every gap between two chunks of a request.
Throughput: output tokens of the round by its wall time. All of it includes the client's own work,
which shares the cores with the servers.
"""

import asyncio
import itertools
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import typer
from openai import AsyncOpenAI
from openai.types import CompletionUsage
from rich.console import Console

from benchmarks import machine, report
from benchmarks.demo_model.text import NAMES, story
from benchmarks.pairs import Spread, alternate
from benchmarks.plots import grouped_bars
from benchmarks.processes import servers

MODEL = Path(__file__).parents[1] / "deploy" / "demo" / "model"
NAME = "bench"
DTYPE = "float32"
UNCACHED = ("--no-enable-prefix-caching",)  # rounds repeat their prompts; each is computed anew
CONCURRENCY = (1, 4, 16)
REQUESTS_PER_WORKER = 4
PROMPT_STORIES = 5
OUTPUT_TOKENS = 64
REQUEST_TIMEOUT_S = 120.0
READY_RETRIES = 10
PAIR, ALONE = "proxy, P and D", "one node"
HEADERS = ("case", "TTFT ms p50", "p99", "ITL ms p50", "p99", "tok/s", "tok/s, ratio")


class Reply(msgspec.Struct, frozen=True):
    """When one request was sent, when its chunks came, and its token counts."""

    sent: float
    chunks: tuple[float, ...]
    prompt_tokens: int
    output_tokens: int


class Round(msgspec.Struct, frozen=True):
    """All replies of one round, and its wall time in seconds."""

    replies: tuple[Reply, ...]
    seconds: float

    @property
    def throughput(self) -> float:
        """Output tokens per second."""
        return sum(reply.output_tokens for reply in self.replies) / self.seconds


class Row(msgspec.Struct, frozen=True):
    """One server at one concurrency; milliseconds, pooled over rounds; mean prompt length."""

    server: str
    concurrency: int
    prompt_tokens: float
    ttft: tuple[float, float]
    itl: tuple[float, float]
    throughput: Spread
    ratio: Spread


class Client:
    """Sends the same requests to one server."""

    def __init__(self, url: str) -> None:
        self._openai = AsyncOpenAI(
            base_url=f"{url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S, max_retries=0
        )

    async def ready(self) -> None:
        """Returns after the first good reply; the client's own retries wait for the server."""
        patient = self._openai.with_options(max_retries=READY_RETRIES)
        await patient.completions.create(model=NAME, prompt="Hello", max_tokens=1)

    async def close(self) -> None:
        """Closes the connections."""
        await self._openai.close()

    async def round(self, concurrency: int) -> Round:
        """REQUESTS_PER_WORKER requests by each of `concurrency` workers."""
        prompts = iter(_prompts(concurrency * REQUESTS_PER_WORKER))
        started = perf_counter()
        done = await asyncio.gather(*(self._work(prompts) for _ in range(concurrency)))
        seconds = perf_counter() - started
        return Round(tuple(itertools.chain.from_iterable(done)), seconds)

    async def _work(self, prompts: Iterator[str]) -> list[Reply]:
        return [await self._ask(prompt) for prompt in prompts]

    async def _ask(self, prompt: str) -> Reply:
        sent = perf_counter()
        stream = await self._openai.completions.create(
            model=NAME,
            prompt=prompt,
            max_tokens=OUTPUT_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        times: list[float] = []
        usage = CompletionUsage(completion_tokens=0, prompt_tokens=0, total_tokens=0)
        async for chunk in stream:
            if chunk.choices:
                times.append(perf_counter())
            usage = chunk.usage or usage
        return Reply(sent, tuple(times), usage.prompt_tokens, usage.completion_tokens)


@contextmanager
def clients(model: str, loop: asyncio.Runner) -> Iterator[dict[str, Client]]:
    """Starts all processes; a client of the proxy and one of the single node; stops all."""
    flags = (model, "--port", "0", "--served-model-name", NAME, "--dtype", DTYPE, *UNCACHED)
    nodes = [(kind, *flags) for kind in ("prefill_node", "decode_node", "decode_node")]
    with tempfile.TemporaryDirectory() as folder, servers(Path(folder), *nodes) as urls:
        p, d, alone = urls
        proxy = ("proxy", "--prefill", p, "--decode", d, "--port", "0")
        with servers(Path(folder), proxy) as (front,):
            made = {PAIR: Client(front), ALONE: Client(alone)}
            for client in made.values():
                loop.run(client.ready())
            yield made
            for client in made.values():
                loop.run(client.close())


def run(model: str, rounds: int, console: Console) -> list[Row]:
    """Every concurrency, both servers in alternating rounds."""
    rows: list[Row] = []
    total = len(CONCURRENCY) * 2 * (rounds + 1)
    with asyncio.Runner() as loop, report.progress(console, total) as describe:
        describe("starting four servers")
        with clients(model, loop) as asked:
            for number in CONCURRENCY:
                ways = {name: _blocking(loop, client, number) for name, client in asked.items()}
                done = describe(f"{number} at once")
                rows += rows_of(number, alternate(ways, rounds, done=done))
    return rows


def rows_of(concurrency: int, rounds: dict[str, list[Round]]) -> list[Row]:
    """A row per server; the ratio is that server's throughput to the single node's, by round."""
    alone = [one.throughput for one in rounds[ALONE]]
    rows = []
    for name, own in rounds.items():
        replies = [reply for one in own for reply in one.replies]
        speeds = [one.throughput for one in own]
        ratio = Spread.of_ratio(speeds, alone)
        times = _percentiles(_ttft(replies)), _percentiles(_itl(replies))
        prompt_tokens = statistics.mean(reply.prompt_tokens for reply in replies)
        rows.append(Row(name, concurrency, prompt_tokens, *times, Spread.of(speeds), ratio))
    return rows


def cells(row: Row) -> list[str]:
    """One line of the table."""
    return [
        f"{row.server}, {row.concurrency} at once",
        *(f"{value:.1f}" for value in (*row.ttft, *row.itl)),
        f"{row.throughput.median:,.0f}",
        row.ratio.show(),
    ]


def _blocking(loop: asyncio.Runner, client: Client, concurrency: int) -> Callable[[], Round]:
    return lambda: loop.run(client.round(concurrency))


def _prompts(count: int) -> list[str]:
    """`count` different prompts, the same in every round."""
    draw = random.Random(count)
    return [
        " ".join(story(draw, draw.choice(NAMES))[0] for _ in range(PROMPT_STORIES))
        for _ in range(count)
    ]


def _ttft(replies: Sequence[Reply]) -> list[float]:
    return [reply.chunks[0] - reply.sent for reply in replies]


def _itl(replies: Sequence[Reply]) -> list[float]:
    return [
        later - earlier for reply in replies for earlier, later in itertools.pairwise(reply.chunks)
    ]


def _percentiles(seconds: Sequence[float]) -> tuple[float, float]:
    """p50 and p99 in milliseconds, by the nearest rank."""
    ordered = sorted(seconds)
    last = len(ordered) - 1
    return 1e3 * ordered[round(0.5 * last)], 1e3 * ordered[round(0.99 * last)]


def main(
    *,
    model: Annotated[str, typer.Option(help="Model folder. [the demo's]")] = str(MODEL),
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one warm-up.")] = 5,
    json: Annotated[Path | None, typer.Option(help="Also write the rows here.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the throughput (svg, png).")] = None,
) -> None:
    """TTFT, ITL and throughput of the cluster and of one node, through the OpenAI client."""
    console = Console()
    host = machine.prepare("all")
    rows = run(model, rounds, console)
    note = (
        f"{DTYPE}, about {statistics.mean(row.prompt_tokens for row in rows):.0f} tokens in, "
        f"{OUTPUT_TOKENS} out, {REQUESTS_PER_WORKER} requests "
        f"per worker, {rounds} rounds; four servers and the client share {machine.describe(host)}"
    )
    report.publish(console, "Serving", headers=HEADERS, rows=list(map(cells, rows)), note=note)
    report.write_json(json, {"machine": host, "rows": rows})
    if plot is not None:
        series = {
            name: [row.throughput for row in rows if row.server == name] for name in (PAIR, ALONE)
        }
        labels = [f"{concurrency} at once" for concurrency in CONCURRENCY]
        grouped_bars(plot, labels, series, ylabel="output tokens/s")


if __name__ == "__main__":
    typer.run(main)
