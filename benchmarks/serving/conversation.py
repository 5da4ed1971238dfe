"""`python -m benchmarks.serving.conversation`: what each turn of a conversation finds and moves.

Users in a closed loop at an own proxy, prefill and decode node, or at each `--target` in turn. Each
turn's prompt is the one before, its answer and new tokens, after a think time. Hits and bytes are
those that the answers tell (`usage`); the own nodes' counters must have counted the same bytes.
Those of a target's nodes are not read, as only its base URL is known. Two clusters that differ in
one flag of their nodes, on and off, are two targets.

The greedy answers must be those of the own decode node, or of `--reference`, when it computes the
same prompts alone: if more than near-ties differ, there is no table, and the status is 1. Requests
that fail are counted; if all do, the status is 1 too.
"""

import asyncio
import random
import secrets
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import msgspec
import typer
from msgspec import Meta

from benchmarks.load.agreement import Agreement, check_runs, tell
from benchmarks.load.client import TargetError
from benchmarks.load.loop import Pace, Run, drive
from benchmarks.load.reply import Reply
from benchmarks.load.request import WITH_IDS, Request, salted
from benchmarks.load.summary import Summary, pulled_bytes, result, total
from benchmarks.serving import outputs
from benchmarks.serving.loads import ids_of, sampled
from benchmarks.serving.options import TargetOptions
from benchmarks.serving.outputs import NOT_TOLD, publish_ratios, tell_failures
from benchmarks.serving.targets import Target, cached_targets_of
from benchmarks.support import machine, report
from benchmarks.support.cluster import Cluster
from benchmarks.support.pairs import share
from benchmarks.support.plots import curves
from engine.errors import ConfigError
from serving.cli import command_app

PURPOSE = "Hit tokens of P and D, and bytes pulled, by turn of a conversation."
QUICK_S = 120.0
QUICK: dict[str, Any] = {
    **{"users": 2, "turns": 3, "think": 0.1, "rounds": 1},
    **{"random_prefix_len": 64, "random_input_len": 64, "added_len": 32, "output_len": 8},
}
THINK_SIGMA = 1.1
MOVED = "tandem:kv_transfer_bytes D"
RESERVE_S = 15.0
# The rest is for the reference, which is asked one request at a time.
RUN_SHARE = 0.6
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


class ConversationOptions(TargetOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the conversations: how many, how long, how often."""

    users: Annotated[int, Meta(ge=1, description="Conversations at once.")] = 4
    turns: Annotated[int, Meta(ge=1, le=40, description="Of each conversation.")] = 6
    think: Annotated[float, Meta(ge=0, description="Median seconds between turns.")] = 2.0
    random_prefix_len: Annotated[
        int, Meta(ge=0, description="Tokens that all conversations begin with.")
    ] = 256
    random_input_len: Annotated[
        int, Meta(ge=1, description="Tokens of each first prompt after that.")
    ] = 512
    added_len: Annotated[int, Meta(ge=1, description="New tokens of each later prompt.")] = 128
    output_len: Annotated[int, Meta(ge=1, description="Tokens of each answer.")] = 32
    rounds: Annotated[
        int, Meta(ge=1, description="Of all conversations at all targets, whose order turns.")
    ] = 1
    seed: Annotated[int, Meta(description="Equal seeds, equal conversations.")] = 0


class Turn(msgspec.Struct, frozen=True):
    """One turn over all conversations: means of tokens and bytes, medians of milliseconds.

    Hits and bytes are None where no answer told of them.
    """

    number: int
    prompt: float
    new: float
    ttft_ms: float
    tpot_ms: float
    prefill_hit: float | None
    decode_hit: float | None
    pulled: float | None
    states: float | None

    @classmethod
    def of(cls, number: int, pairs: Sequence[tuple[int, Reply]]) -> "Turn":
        """`pairs`: tokens of the prompt and the answer before, and the reply, of each that came."""
        replies = [reply for _, reply in pairs]

        def mean(told: Callable[[Reply], int | None]) -> float | None:
            found = total(map(told, replies))
            return None if found is None else found / len(replies)

        return cls(
            number,
            statistics.mean(reply.prompt_tokens for reply in replies),
            statistics.mean(reply.prompt_tokens - before for before, reply in pairs),
            1e3 * statistics.median(reply.ttft for reply in replies),
            1e3 * statistics.median(reply.tpot for reply in replies),
            mean(lambda reply: reply.cached_tokens),
            mean(lambda reply: reply.transferred("decode_cached_tokens")),
            mean(pulled_bytes),
            mean(lambda reply: reply.transferred("state_bytes")),
        )

    def cells(self, target: str) -> list[str]:
        """A line of the table."""
        told: list[tuple[float | None, float, int]] = [
            (self.prefill_hit, 1, 0),
            (self.decode_hit, 1, 0),
            (self.pulled, 1e6, 2),
            (self.states, 1e6, 2),
        ]
        return [
            f"{target}, turn {self.number}",
            f"{self.prompt:,.0f}",
            f"{self.new:,.0f}",
            f"{self.ttft_ms:.0f}",
            f"{self.tpot_ms:.1f}",
            *(NOT_TOLD if it is None else f"{it / unit:,.{digits}f}" for it, unit, digits in told),
        ]


def requests_of(options: ConversationOptions) -> list[Request]:
    """Conversations of equal length that share their first tokens; think times are lognormal."""
    draw, ids = random.Random(options.seed), ids_of(options)
    shared = draw.choices(ids, k=options.random_prefix_len)
    made = []
    for user in range(options.users):
        for turn in range(options.turns):
            first = turn == 0
            added = draw.choices(ids, k=options.random_input_len if first else options.added_len)
            think_s = options.think * draw.lognormvariate(0.0, THINK_SIGMA)
            made.append(
                Request(
                    prompt=(*shared, *added) if first else tuple(added),
                    max_tokens=options.output_len,
                    sampling=WITH_IDS,
                    session=f"user {user}",
                    think_s=0.0 if first else think_s,
                    continues=not first,
                )
            )
    return sampled(made, options)


def turns_of(runs: Sequence[Run], turns: int) -> list[Turn]:
    """By number, over all rounds; a turn that nobody answered is left out."""
    found = []
    for number in range(turns):
        pairs = [pair for run in runs for pair in _answered(run, number, turns)]
        if pairs:
            found.append(Turn.of(number + 1, pairs))
    return found


def _answered(run: Run, number: int, turns: int) -> Iterator[tuple[int, Reply]]:
    for place in range(number, len(run.replies), turns):
        before = run.replies[place - 1] if number else None
        if not run.replies[place].error:
            known = before.prompt_tokens + before.output_tokens if before else 0
            yield known, run.replies[place]


class Played(msgspec.Struct, frozen=True):
    """All runs of each target by round, and how its answers compare.

    `counted`: bytes that the nodes counted, of an own cluster.
    """

    runs: dict[str, list[Run]]
    agreements: dict[str, Agreement]
    models: dict[str, str]
    counted: int | None


async def play(
    options: ConversationOptions,
    requests: Sequence[Request],
    targets: Sequence[Target],
    *,
    reference: Target,
    up: Cluster | None,
    ends_at: float,
    tell: report.Tell,
) -> Played:
    """All conversations at each target by turns; then the reference alone. Raises TargetError."""
    async with AsyncExitStack() as stack:
        clients, models = {}, {}
        for target in targets:
            client = await stack.enter_async_context(target.client(options))
            await client.check(requests[0])
            clients[target.name], models[target.name] = client, client.model
        alone = await stack.enter_async_context(reference.client(options))
        await alone.check(requests[0])
        now, before = monotonic(), _counted(up)
        until = now + RUN_SHARE * (ends_at - now)
        names = [name for number in range(options.rounds) for name in _turned(clients, number)]
        runs: dict[str, list[Run]] = {name: [] for name in clients}
        for number, name in enumerate(names):
            left_s = share(until, len(names) - number) - monotonic()
            pace = Pace(at_once=options.users, deadline_s=max(1.0, left_s))
            # What an earlier run left in the same caches is no hit of this one.
            load = salted(requests, f"conversation {secrets.token_hex(4)}")
            run = await drive(clients[name].send, load, pace, done=tell(name))
            runs[name].append(run)
        counted = _counted(up) - before
        every = {f"{name} {at}": run for name, own in runs.items() for at, run in enumerate(own)}
        found = await check_runs(alone, every, ends_at=ends_at, done=tell("the reference"))
        agreements = {name: Agreement() for name in clients}
        for name, own in runs.items():
            for at in range(len(own)):
                agreements[name] = agreements[name].plus(found[f"{name} {at}"])
        return Played(runs, agreements, models, counted if up else None)


def _counted(up: Cluster | None) -> int:
    return round(up.counted().get(MOVED, 0.0)) if up else 0


def _turned(names: Iterable[str], number: int) -> list[str]:
    every = list(names)
    turn = number % len(every)
    return every[turn:] + every[:turn]


def measure(
    found: report.Report, requests: Sequence[Request], options: ConversationOptions
) -> Played:
    """All conversations at all targets. Raises TargetError."""
    total_runs = options.rounds * max(1, len(options.target)) + 1
    with (
        report.progress(found.console, total_runs * len(requests)) as tell,
        cached_targets_of(options) as (targets, reference, up),
    ):
        playing = play(
            options,
            requests,
            targets,
            reference=reference,
            up=up,
            ends_at=found.ends_at - RESERVE_S,
            tell=tell,
        )
        return asyncio.run(playing)


def publish(
    found: report.Report,
    options: ConversationOptions,
    turns: Mapping[str, Sequence[Turn]],
    *,
    summaries: Mapping[str, Sequence[Summary]],
    counted: int | None,
) -> None:
    """The tables and the plot; raises RuntimeError if the own nodes counted other bytes."""
    told = total(one.pulled_bytes for own in summaries.values() for one in own)
    by_nodes = (
        "the nodes' counters are not read" if counted is None else f"the nodes counted {counted:,}"
    )
    by_answers = "of no bytes" if told is None else f"of {told:,} bytes"
    note = (
        f"{options.users} users, {options.think:g} s of thought in the median, "
        f"{options.output_len} tokens out, rounds: {options.rounds}; answers tell {by_answers}, "
        f"{by_nodes}; {machine.describe(found.host)}"
    )
    rows = [turn.cells(name) for name, own in turns.items() for turn in own]
    found.publish("Conversation", headers=HEADERS, rows=rows, note=note)
    publish_ratios(found, summaries)
    whole = not any(one.failed for own in summaries.values() for one in own)
    if counted is not None and whole and (told or 0) != counted:
        raise RuntimeError(f"answers tell of {told} bytes, the nodes counted {counted}")
    panels = {}
    for name, own in turns.items():
        hits = {"prompt": "prompt", "P hit": "prefill_hit", "D hit": "decode_hit"}
        lines = {
            label: [
                (float(turn.number), getattr(turn, field))
                for turn in own
                if getattr(turn, field) is not None
            ]
            for label, field in hits.items()
        }
        panels[name] = {label: points for label, points in lines.items() if points}
    curves(found.plot(), panels, xlabel="turn", ylabel="tokens", log_x=False)


def converse(load: Callable[[], ConversationOptions]) -> None:
    """The command; status 1 if answers differ or none came, 2 if it cannot measure."""
    try:
        options = load()
        if options.quick:
            options = msgspec.structs.replace(options, **QUICK)
        limits = (60 * options.minutes, QUICK_S)
        out = Path(options.out)
        found = report.Report("conversation", out, limits, cpu="all", quick=options.quick)
        played = measure(found, requests_of(options), options)
    except (ConfigError, TargetError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    summaries = {
        name: [Summary.of(run, ranks=options.ranks()) for run in own]
        for name, own in played.runs.items()
    }
    turns = {name: turns_of(own, options.turns) for name, own in played.runs.items()}
    holds = tell(found.console, played.agreements)
    came = tell_failures(summaries)
    if holds and came:
        publish(found, options, turns, summaries=summaries, counted=played.counted)
    outputs.write(found, options, played.runs)
    pace = Pace(at_once=options.users)
    results = [
        result(one, pace, target=name, model=played.models[name])
        for name, own in summaries.items()
        for one in own
    ]
    data = {"turns": turns, "agreements": played.agreements, "results": results}
    found.save({"options": options.without_secrets(), **data})
    raise typer.Exit(0 if holds and came else 1)


if __name__ == "__main__":
    command_app(ConversationOptions, converse, PURPOSE)()
