"""`python -m benchmarks.serving.conversation`: what each turn of a conversation finds and moves.

Users in a closed loop through the proxy, a prefill and a decode node. Each turn's prompt is the one
before, its answer and new tokens, after a think time. Hits and bytes are those that the answers
tell (`usage.kv_transfer`); the nodes' own counters must have counted the same bytes. The greedy
answers must be those of the decode node when it computes the same prompts alone: if more than
near-ties differ, there is no table, and the status is 1.
"""

import asyncio
import random
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import typer

from benchmarks.load.agreement import Agreement, check_run, tell
from benchmarks.load.client import Client
from benchmarks.load.loop import Pace, Run, drive
from benchmarks.load.reply import Reply
from benchmarks.load.request import WITH_IDS, Request
from benchmarks.load.summary import Summary, result
from benchmarks.support import machine, report
from benchmarks.support.cluster import NAME, cluster
from benchmarks.support.models import SHARED, WIDE, save_random
from benchmarks.support.plots import curves

SECONDS = (300, 60)
OUTPUT_TOKENS = 32
SHARED_TOKENS, OWN_TOKENS, ADDED_TOKENS = 256, 512, 128
THINK_SIGMA = 1.1
ARENA_BYTES = 1 << 30
MOVED = "tandem:kv_transfer_bytes D"
RESERVE_S = 15.0
HEADERS = (
    "turn",
    "prompt",
    "new",
    "TTFT ms p50",
    "TPOT ms p50",
    "P hit",
    "D hit",
    "MB pulled",
    "of it states",
)


class Turn(msgspec.Struct, frozen=True):
    """One turn over all conversations: means of tokens and bytes, medians of milliseconds."""

    number: int
    prompt: float
    new: float
    ttft_ms: float
    tpot_ms: float
    prefill_hit: float
    decode_hit: float
    attention_bytes: float
    state_bytes: float

    @classmethod
    def of(cls, number: int, replies: Sequence[Reply], before: float) -> "Turn":
        """`before`: tokens of prompts and answers of the turn before, in the mean."""
        prompt = statistics.mean(reply.prompt_tokens for reply in replies)
        costs: list[dict[str, Any]] = [reply.usage.get("kv_transfer") or {} for reply in replies]

        def mean(name: str) -> float:
            return statistics.mean(float(cost.get(name) or 0) for cost in costs)

        return cls(
            number,
            prompt,
            prompt - before,
            1e3 * statistics.median(reply.ttft for reply in replies),
            1e3 * statistics.median(reply.tpot for reply in replies),
            mean("prefill_cached_tokens"),
            mean("decode_cached_tokens"),
            mean("attention_bytes"),
            mean("state_bytes"),
        )

    def cells(self) -> list[str]:
        """A line of the table."""
        moved = self.attention_bytes + self.state_bytes
        return [
            f"turn {self.number}",
            f"{self.prompt:,.0f}",
            f"{self.new:,.0f}",
            f"{self.ttft_ms:.0f}",
            f"{self.tpot_ms:.1f}",
            f"{self.prefill_hit:,.0f}",
            f"{self.decode_hit:,.0f}",
            f"{moved / 1e6:.2f}",
            f"{self.state_bytes / 1e6:.2f}",
        ]


def requests_of(users: int, turns: int, think_s: float, *, seed: int) -> list[Request]:
    """Conversations of equal length that share their first tokens; think times are lognormal."""
    draw = random.Random(seed)
    shared = _tokens(draw, SHARED_TOKENS)
    made = []
    for user in range(users):
        for turn in range(turns):
            first = turn == 0
            prompt = _tokens(draw, OWN_TOKENS) if first else _tokens(draw, ADDED_TOKENS)
            made.append(
                Request(
                    prompt=(*shared, *prompt) if first else prompt,
                    max_tokens=OUTPUT_TOKENS,
                    sampling=WITH_IDS,
                    session=f"user {user}",
                    think_s=0.0 if first else think_s * draw.lognormvariate(0.0, THINK_SIGMA),
                    continues=not first,
                )
            )
    return made


def turns_of(run: Run, turns: int) -> list[Turn]:
    """By number; raises RuntimeError if a request failed."""
    if errors := [reply.error for reply in run.replies if reply.error]:
        raise RuntimeError(errors[0])
    found: list[Turn] = []
    before = 0.0
    for number in range(turns):
        found.append(Turn.of(number + 1, run.replies[number::turns], before))
        before = found[-1].prompt + OUTPUT_TOKENS
    return found


def pulled(run: Run) -> int:
    """Bytes that D pulled, as the answers tell."""
    costs = [reply.usage.get("kv_transfer") or {} for reply in run.replies]
    return sum(cost.get("attention_bytes", 0) + cost.get("state_bytes", 0) for cost in costs)


class Played(msgspec.Struct, frozen=True):
    """All conversations, the bytes that the nodes counted, and how the answers compare."""

    run: Run
    counted: int
    agreement: Agreement


def measure(found: report.Report, requests: Sequence[Request], users: int) -> Played:
    """All conversations on one new cluster, whose D is then asked the same alone."""
    with (
        tempfile.TemporaryDirectory() as folder,
        report.progress(found.console, 2 * len(requests)) as describe,
    ):
        done = describe("a cluster")
        model = save_random(WIDE, Path(folder))
        with cluster(model, "--kv-cache-memory-bytes", str(ARENA_BYTES)) as up:
            ends_at = found.ends_at - RESERVE_S
            left = ends_at - monotonic()
            run = asyncio.run(_play(up.proxy, requests, users, left_s=left, done=done))
            counted = round(up.counted().get(MOVED, 0.0))
            done = describe("the node alone")
            agreement = asyncio.run(_check(up.decode[0], run, ends_at, done=done))
            return Played(run, counted, agreement)


async def _play(
    url: str, requests: Sequence[Request], users: int, *, left_s: float, done: Callable[[], None]
) -> Run:
    async with Client(url, NAME) as client:
        pace = Pace(at_once=users, deadline_s=left_s)
        return await drive(client.send, requests, pace, done=done)


async def _check(url: str, run: Run, ends_at: float, *, done: Callable[[], None]) -> Agreement:
    async with Client(url, NAME) as alone:
        return await check_run(alone, run, ends_at=ends_at, done=done)


def publish(found: report.Report, rows: Sequence[Turn], played: Played, *, note: str) -> None:
    """The table and the plot; raises RuntimeError if the nodes counted other bytes."""
    told = pulled(played.run)
    note = (
        f"{note}, {OUTPUT_TOKENS} tokens out; answers tell of {told:,} bytes, the nodes counted "
        f"{played.counted:,}; {machine.describe(found.host)}"
    )
    cells = [row.cells() for row in rows]
    found.publish("Conversation", headers=HEADERS, rows=cells, note=note)
    if told != played.counted:
        raise RuntimeError(f"answers tell of {told} bytes, the nodes counted {played.counted}")
    lines = {
        "prompt": [(float(row.number), row.prompt) for row in rows],
        "P hit": [(float(row.number), row.prefill_hit) for row in rows],
        "D hit": [(float(row.number), row.decode_hit) for row in rows],
    }
    curves(found.plot(), {"by turn": lines}, xlabel="turn", ylabel="tokens", log_x=False)


def main(
    *,
    users: Annotated[int, typer.Option(min=1, help="Conversations at once.")] = 4,
    turns: Annotated[int, typer.Option(min=1, max=40, help="Of each conversation.")] = 6,
    think: Annotated[float, typer.Option(min=0, help="Median seconds between turns.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Equal seeds, equal conversations.")] = 0,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Hit tokens of P and D, and bytes pulled, by turn of a conversation."""
    found = report.Report("conversation", out, SECONDS, cpu="all", quick=quick)
    if quick:
        users, turns, think = 2, 3, 0.1
    played = measure(found, requests_of(users, turns, think, seed=seed), users)
    rows = turns_of(played.run, turns)
    holds = tell(found.console, {"proxy, P and D": played.agreement})
    if holds:
        note = f"{users} users, {think:g} s of thought in the median"
        publish(found, rows, played, note=note)
    summary, pace = Summary.of(played.run), Pace(at_once=users)
    results = [result(summary, pace, target="proxy, P and D", model=WIDE)]
    found.save({"turns": rows, "agreement": played.agreement, "results": results})
    raise typer.Exit(0 if holds else 1)


def _tokens(draw: random.Random, count: int) -> tuple[int, ...]:
    return tuple(draw.randrange(2, SHARED["vocab_size"]) for _ in range(count))


if __name__ == "__main__":
    typer.run(main)
