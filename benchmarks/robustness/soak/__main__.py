"""`python -m benchmarks.robustness.soak`: does anything break in twelve minutes of faults?

Two prefill nodes, two decode nodes and a proxy as real processes, with tiers, KV events and keys of
two tenants. Clients of both ask through the proxy: prompts and chats, with penalties, JSON schemas,
regular expressions and forced tool calls, in four manners: a whole answer, a stream, a stream read
slowly, a stream that is left in the middle. Meanwhile nodes are killed, frozen for 3 to 40 s and
terminated, and hostile clients send what no good client would, to the proxy and to the nodes. Every
answer is compared with that of one undisturbed node: tokens, text, tool calls and why it ended.
`--kills` leaves kills and good clients.

Allowed are explicit errors (503 while all decode nodes are away). Not allowed: one different token,
an end without a word, a silence of more than 20 s, a server that fails, memory or descriptors that
do not come back. The command then ends with status 1.
"""

import asyncio
import os
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import Annotated

import aiohttp
import typer

from benchmarks.robustness.soak import hostile
from benchmarks.robustness.soak.at_rest import WARM_REQUESTS, Baselines, left, unjudged, values
from benchmarks.robustness.soak.client import MANNERS, Verdict, ask
from benchmarks.robustness.soak.cluster import (
    FAULTS,
    KILLS,
    OPERATOR_KEY,
    TENANTS,
    Cluster,
    cluster,
    node_command,
)
from benchmarks.robustness.soak.outcome import Soak, explain
from benchmarks.robustness.soak.workload import Question, questions, with_answers
from benchmarks.support import machine, report
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.support.processes import servers

NUM_QUESTIONS, QUICK_QUESTIONS = 72, 12
MORE_MINUTES = 6.0
"""Minutes that reference, start and settling take at most."""
QUICK_S, QUICK_MINUTES, QUICK_STREAMS = 120.0, 0.1, 2
QUICK_WARM_REQUESTS = 2
SEED = 0
TOKEN = "known to all servers of the soak"
PAUSE_S, PAUSE_OF_KILLS_S = (2.0, 7.0), (10.0, 30.0)
HOSTILE_PAUSE_S = (0.2, 2.0)
MEND_S = 0.2
SETTLE_S = 70
SWEEPS = 3
"""Two make the last lives warm, which faults every few seconds do not let; one comes on top."""
IN_USE = "tandem_proxy_available_nodes{"
BROKEN_STREAMS = "tandem_proxy_broken_streams_total{"
HEADERS = ("what", "number")


async def run(
    asked: Sequence[Question],
    up: Cluster,
    *,
    seconds: float,
    streams: int,
    kills: bool,
    num_warm: int,
) -> Soak:
    """One soak; afterwards every node is up again and every question is asked thrice more.

    Lives that have finished `num_warm` requests are judged for leaks.
    """
    soak, baselines = Soak(), Baselines(num_warm)
    await _sweep(asked, up, soak)
    started = monotonic()
    work = [_client(random.Random(number), asked, up, soak=soak) for number in range(streams)]
    work += [_chaos(up, kills=kills), _mend(up), _sample(up, soak, started), _warm(up, baselines)]
    work += [] if kills else [_hostile(up, soak)]
    tasks = [asyncio.create_task(one) for one in work]
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    await _afterwards(asked, up, soak, baselines=baselines)
    return soak


async def _client(
    draw: random.Random, asked: Sequence[Question], up: Cluster, *, soak: Soak
) -> None:
    key = draw.choice(tuple(TENANTS))
    async with aiohttp.ClientSession(up.proxy.url, headers=_with_key(key)) as http:
        while True:
            answer = await ask(http, draw.choice(asked), draw, manner=draw.choice(MANNERS))
            soak.answers.append(answer)
            if answer.verdict is Verdict.ERROR:
                await asyncio.sleep(0.5)  # as Retry-After would ask for, only shorter


async def _hostile(up: Cluster, soak: Soak) -> None:
    """One hostile client. What a server answers whose life ends meanwhile proves nothing."""
    draw = random.Random(-1)
    while True:
        member = draw.choice([up.proxy, up.proxy, *up.nodes])
        life, was_up = member.lives, member.is_up
        act, outcome = await hostile.strike(member.url, draw)
        if was_up and member.is_up and member.lives == life:
            soak.strikes[act, outcome] += 1
        await asyncio.sleep(draw.uniform(*HOSTILE_PAUSE_S))


async def _chaos(up: Cluster, *, kills: bool) -> None:
    draw = random.Random(-2)
    while True:
        await asyncio.sleep(draw.uniform(*(PAUSE_OF_KILLS_S if kills else PAUSE_S)))
        up.disturb(draw, KILLS if kills else FAULTS)


async def _mend(up: Cluster) -> None:
    while True:
        up.mend()
        await asyncio.sleep(MEND_S)


async def _sample(up: Cluster, soak: Soak, started: float) -> None:
    while True:
        soak.watch.take(monotonic() - started, up.members)
        await asyncio.sleep(1.0)


async def _warm(up: Cluster, baselines: Baselines) -> None:
    while True:
        await baselines.take(up.members)
        await asyncio.sleep(1.0)


async def _afterwards(
    asked: Sequence[Question],
    up: Cluster,
    soak: Soak,
    *,
    baselines: Baselines,
) -> None:
    """Everything is mended, then right, then at rest."""
    for _ in range(round(SETTLE_S / MEND_S)):
        up.mend(at_once=True)
        if all(member.is_up for member in up.members):
            break
        await asyncio.sleep(MEND_S)
    for member in up.members:
        await asyncio.to_thread(member.wait_until_serving)
        soak.ends.update(member.ends)
        soak.kills += member.killed_at
    await _all_in_use(up)
    await _count_streams(up, soak)
    wrong = 0
    for _ in range(SWEEPS):
        wrong += len(asked) - await _sweep(asked, up, soak)
        await baselines.take(up.members)
    if wrong:
        soak.left.append(f"{wrong} of {SWEEPS * len(asked)} answers are not equal afterwards")
    soak.judged = [member.name for member in baselines.judged(up.members)]
    soak.left += unjudged(up, baselines)
    for _ in range(SETTLE_S):
        found = await left(up, baselines)
        if not found:
            break
        await asyncio.sleep(1.0)
    soak.left += found
    if orphans := sum([await asyncio.to_thread(member.orphans) for member in up.members]):
        soak.left.append(f"{orphans} processes outlive the servers that had them")


async def _count_streams(up: Cluster, soak: Soak) -> None:
    for line in await _metrics(up.proxy.url):
        if line.startswith(BROKEN_STREAMS):
            soak.streams[line.split('"')[1]] = round(float(line.rpartition(" ")[2]))


async def _all_in_use(up: Cluster) -> None:
    """Returns when the proxy uses all nodes again, or has had time enough."""
    for _ in range(SETTLE_S):
        if sum(await values(up.proxy.url, IN_USE)) == len(up.nodes):
            return
        await asyncio.sleep(1.0)


async def _sweep(asked: Sequence[Question], up: Cluster, soak: Soak) -> int:
    """Every question once, as a stream; how many answers were equal."""
    draw = random.Random(0)
    equal = 0
    async with aiohttp.ClientSession(up.proxy.url, headers=_with_key(OPERATOR_KEY)) as http:
        for question in asked:
            answer = await ask(http, question, draw, manner="stream")
            soak.answers.append(answer)
            equal += answer.verdict is Verdict.EQUAL
    return equal


def _with_key(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def _metrics(url: str) -> list[str]:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as reply:
        return (await reply.text()).splitlines()


def main(
    *,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long nodes are disturbed.")] = 12.0,
    streams: Annotated[int, typer.Option(min=1, help="Good clients at once.")] = 8,
    kills: Annotated[
        bool, typer.Option("--kills", help="Only SIGKILL, and only good clients.")
    ] = False,
    model: Annotated[str, typer.Option(help="Model folder. [the demo's]")] = str(DEMO_MODEL),
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Twelve minutes of kills, stops and hostile clients; status 1 for a broken promise."""
    whole_s = 60 * (minutes + MORE_MINUTES)
    found = report.Report("soak", out, (whole_s, QUICK_S), cpu="all", quick=quick)
    if quick:
        minutes, streams = QUICK_MINUTES, QUICK_STREAMS
    os.environ["TANDEM_CLUSTER_TOKEN"] = TOKEN
    with tempfile.TemporaryDirectory() as folder:
        place = logs or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        asked = questions(QUICK_QUESTIONS if quick else NUM_QUESTIONS, SEED)
        with servers(place, (*node_command("decode", model), "--port", "0")) as (alone,):
            asked = asyncio.run(with_answers(alone, asked))
        with cluster(model, place) as up:
            running = run(
                asked,
                up,
                seconds=60 * minutes,
                streams=streams,
                kills=kills,
                num_warm=QUICK_WARM_REQUESTS if quick else WARM_REQUESTS,
            )
            soak = asyncio.run(running)
    note = (
        f"{streams} clients, {minutes:g} minutes; all of it shares {machine.describe(found.host)}"
    )
    found.publish("Soak", headers=HEADERS, rows=soak.rows(), note=note)
    explain(found.console, soak)
    soak.watch.draw(found.plot())
    found.save({"rows": soak.rows(), "broken": soak.broken()})
    sys.exit(1 if soak.broken() else 0)


if __name__ == "__main__":
    typer.run(main)
