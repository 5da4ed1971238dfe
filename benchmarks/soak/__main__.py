"""`python -m benchmarks.soak`: does anything break when everything goes wrong for ten minutes?

Two prefill nodes, two decode nodes and a proxy as real processes. Clients ask through the proxy, in
four manners: a whole answer, a stream, a stream read slowly, a stream that is left in the middle.
Meanwhile nodes are killed, frozen for 3 to 40 s and terminated, and hostile clients send what no
good client would, to the proxy and to the nodes. Every answer is compared with that of one
undisturbed node.

Allowed are explicit errors (503 while all decode nodes are away). Not allowed: one different token,
an end without a word, a silence of more than 20 s, a server that fails, memory or descriptors that
do not come back. The command then ends with status 1.
"""

import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Annotated

import aiohttp
import typer
from rich.console import Console

from benchmarks import machine, report
from benchmarks.processes import servers
from benchmarks.serving import MODEL
from benchmarks.soak import hostile
from benchmarks.soak.client import HANG_S, MANNERS, Answer, Verdict, ask
from benchmarks.soak.cluster import Cluster, cluster, node_command
from benchmarks.soak.watch import Holdings, Watch, holdings
from benchmarks.soak.workload import Question, questions, with_answers

NUM_QUESTIONS, QUICK_QUESTIONS = 60, 6
MORE_MINUTES = 6.0
"""What reference, start and settling take at most."""
QUICK_S, QUICK_MINUTES, QUICK_WORKERS = 120.0, 0.1, 2
TOKEN = "known to all servers of the soak"
PAUSE_S = (2.0, 7.0)
HOSTILE_PAUSE_S = (0.2, 2.0)
MEND_S = 0.2
SETTLE_S = 70
IN_USE = "tandem_proxy_available_nodes{"
AT_REST = ("vllm:num_requests_running", "vllm:num_requests_waiting", "tandem:held_lease_bytes")
ALLOWED = (Verdict.EQUAL, Verdict.CANCELLED, Verdict.ERROR)
HEADERS = ("what", "number")


@dataclass(slots=True)
class Soak:
    """Everything that a run has seen."""

    answers: list[Answer] = field(default_factory=list)
    strikes: Counter[tuple[str, str]] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    left: list[str] = field(default_factory=list)
    watch: Watch = field(default_factory=Watch)

    def broken(self) -> list[str]:
        """Every promise that was broken, in words."""
        verdicts = Counter(one.verdict for one in self.answers if one.verdict not in ALLOWED)
        found = [f"{number} answers: {verdict}" for verdict, number in verdicts.items()]
        if hung := sum(one.hung for one in self.answers):
            found.append(f"{hung} silences of more than {HANG_S:g} s")
        found += [
            f"hostile {act}: {how} ({number} times)"
            for (act, how), number in self.strikes.items()
            if hostile.is_bad(how)
        ]
        found += [
            f"{number} processes {how}"
            for how, number in self.ends.items()
            if how.startswith(("died", "SIGTERM"))
        ]
        return [*found, *self.left]

    def rows(self) -> list[list[str]]:
        """The table."""
        equal = sorted(one.total_s for one in self.answers if one.verdict is Verdict.EQUAL)
        silences = [one.silence_s for one in self.answers]
        rows = [["requests", f"{len(self.answers):,}"]]
        rows += [
            [f"... {verdict}", str(number)] for verdict, number in sorted(self._verdicts().items())
        ]
        rows += [[f"fault: {name}", str(number)] for name, number in sorted(self.ends.items())]
        rows += [["hostile requests", str(self.strikes.total())]]
        if equal:
            rows += [["seconds of equal answers, p50", f"{statistics.median(equal):.2f}"]]
            rows += [["... p95", f"{equal[int(0.95 * (len(equal) - 1))]:.2f}"]]
        rows += [["longest silence, s", f"{max(silences, default=0.0):.1f}"]]
        rows += [["silences > 20 s", str(sum(one.hung for one in self.answers))]]
        return rows

    def _verdicts(self) -> Counter[str]:
        return Counter(str(one.verdict) for one in self.answers)


async def run(asked: Sequence[Question], up: Cluster, *, seconds: float, workers: int) -> Soak:
    """One soak; afterwards every node is up again and every question is asked once more."""
    soak = Soak()
    await _sweep(asked, up, soak)
    before = {member.name: holdings(member) for member in up.members}
    started = monotonic()
    tasks = [
        asyncio.create_task(_client(random.Random(number), asked, up, soak=soak))
        for number in range(workers)
    ]
    tasks += [
        asyncio.create_task(one)
        for one in (_hostile(up, soak), _chaos(up), _mend(up), _sample(up, soak, started))
    ]
    done, _ = await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()
    await _afterwards(asked, up, soak, before=before)
    return soak


async def _client(
    draw: random.Random, asked: Sequence[Question], up: Cluster, *, soak: Soak
) -> None:
    async with aiohttp.ClientSession(up.proxy.url) as http:
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


async def _chaos(up: Cluster) -> None:
    draw = random.Random(-2)
    while True:
        await asyncio.sleep(draw.uniform(*PAUSE_S))
        up.disturb(draw)


async def _mend(up: Cluster) -> None:
    while True:
        up.mend()
        await asyncio.sleep(MEND_S)


async def _sample(up: Cluster, soak: Soak, started: float) -> None:
    while True:
        soak.watch.take(monotonic() - started, up.members)
        await asyncio.sleep(1.0)


async def _afterwards(
    asked: Sequence[Question],
    up: Cluster,
    soak: Soak,
    *,
    before: dict[str, Holdings | None],
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
    await _all_in_use(up)
    wrong = len(asked) - await _sweep(asked, up, soak)
    if wrong:
        soak.left.append(f"{wrong} of {len(asked)} answers are not equal afterwards")
    for _ in range(SETTLE_S):
        left = await _left(up, before)
        if not left:
            return
        await asyncio.sleep(1.0)
    soak.left += left


async def _all_in_use(up: Cluster) -> None:
    """Returns when the proxy uses all nodes again, or has had time enough."""
    for _ in range(SETTLE_S):
        lines = [line for line in await _metrics(up.proxy.url) if line.startswith(IN_USE)]
        if sum(float(line.rpartition(" ")[2]) for line in lines) == len(up.nodes):
            return
        await asyncio.sleep(1.0)


async def _sweep(asked: Sequence[Question], up: Cluster, soak: Soak) -> int:
    """Every question once, as a stream; how many answers were equal."""
    draw = random.Random(0)
    equal = 0
    async with aiohttp.ClientSession(up.proxy.url) as http:
        for question in asked:
            answer = await ask(http, question, draw, manner="stream")
            soak.answers.append(answer)
            equal += answer.verdict is Verdict.EQUAL
    return equal


async def _left(up: Cluster, before: dict[str, Holdings | None]) -> list[str]:
    """What a member holds that it should not hold at rest."""
    found = []
    for member in up.members:
        now, then = holdings(member), before[member.name]
        if now is not None and then is not None and (excess := now.excess(then)):
            found.append(f"{member.name} holds {excess} beyond its start")
        for line in await _metrics(member.url):
            if line.startswith(AT_REST) and float(line.rpartition(" ")[2]):
                found.append(f"{member.name}: {line}")
    return found


async def _metrics(url: str) -> list[str]:
    async with aiohttp.ClientSession(url) as http, http.get("/metrics") as reply:
        return (await reply.text()).splitlines()


def main(
    *,
    minutes: Annotated[float, typer.Option(min=0.1, help="How long nodes are disturbed.")] = 10.0,
    workers: Annotated[int, typer.Option(min=1, help="Good clients at once.")] = 8,
    seed: Annotated[int, typer.Option(help="Of the questions.")] = 0,
    model: Annotated[str, typer.Option(help="Model folder. [the demo's]")] = str(MODEL),
    logs: Annotated[Path | None, typer.Option(help="Keep the servers' logs here.")] = None,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Ten minutes of kills, stops, hostile and impatient clients; status 1 for a broken promise."""
    whole_s = 60 * (minutes + MORE_MINUTES)
    found = report.Report("soak", out, (whole_s, QUICK_S), cpu="all", quick=quick)
    if quick:
        minutes, workers = QUICK_MINUTES, QUICK_WORKERS
    os.environ["TANDEM_CLUSTER_TOKEN"] = TOKEN
    with tempfile.TemporaryDirectory() as folder:
        place = logs or Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        asked = questions(QUICK_QUESTIONS if quick else NUM_QUESTIONS, seed)
        with servers(place, (*node_command("decode", model), "--port", "0")) as (alone,):
            asked = asyncio.run(with_answers(alone, asked))
        with cluster(model, place) as up:
            soak = asyncio.run(run(asked, up, seconds=60 * minutes, workers=workers))
    note = (
        f"{workers} clients, {minutes:g} minutes; all of it shares {machine.describe(found.host)}"
    )
    found.publish("Soak", headers=HEADERS, rows=soak.rows(), note=note)
    _explain(found.console, soak)
    soak.watch.draw(found.plot())
    found.save({"rows": soak.rows(), "broken": soak.broken()})
    sys.exit(1 if soak.broken() else 0)


def _explain(console: Console, soak: Soak) -> None:
    causes = Counter(one.cause for one in soak.answers if one.verdict is Verdict.ERROR)
    for cause, number in causes.most_common():
        console.print(f"{number:6} x {cause}", style="dim", highlight=False)
    for (act, outcome), number in sorted(soak.strikes.items()):
        console.print(f"{number:6} x {act}: {outcome}", style="dim", highlight=False)
    for broken in soak.broken():
        console.print(f"BROKEN: {broken}", style="bold red", highlight=False)
    for one in soak.answers:
        if one.verdict not in ALLOWED or one.hung:
            with suppress(UnicodeEncodeError):
                console.print(f"  {one.manner}: {one.verdict}, {one.silence_s:.1f} s: {one.cause}")


if __name__ == "__main__":
    typer.run(main)
