"""`python -m benchmarks.cache.routing`: routing policies on a simulated cluster.

The proxy's real index, prompts under way and policies, and every node's real KV cache with the
units of Qwen3.5-4B; only computing, links and time are simulated. G1 conversation, G2 documents, a
trap in which all prompts share 512 tokens and nothing else, or a trace in Mooncake's format.

- TTFT: queue and prefill on P, one prompt after another, then the pull, then a slot on D.
- hit: tokens that P did not compute; the first quarter of the requests fills caches, uncounted.
- utilisation: how busy least_loaded keeps P with the hits that it finds; all policies then have the
  same nodes.
- longest_prefix: the node that holds most of the prompt, whatever waits there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.cache.routing.event_feed import EventPath
from benchmarks.cache.routing.experiment import (
    DELAYS,
    JUDGED_DELAY,
    NO_DELAY,
    Cluster,
    Row,
    Verdict,
    measure,
    read,
    verdicts,
)
from benchmarks.cache.routing.simulator import ALL_POLICIES
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread
from benchmarks.support.plots import curves, grouped_bars
from benchmarks.workloads.traces import TraceError

TIME_S = (240, 60)
SECONDS, QUICK_SECONDS = 600.0, 20.0
NODE_BYTES = 40_000_000_000
HEADERS = ("case", "hit %", "TTFT mean s", "p90 s", "p99 s", "busiest node", "decision us")
VERDICT_HEADERS = ("check", "found", "at most", "met")


def cells(row: Row) -> list[str]:
    """One line of a table."""
    out = row.outcome
    times = (f"{seconds:.2f}" for seconds in (out.mean_s, out.p90_s, out.p99_s))
    case = f"{row.workload}: {row.policy}"
    return [case, f"{out.hit_share:.1%}", *times, f"{out.busiest:.0%}", f"{out.decision_us:.0f}"]


def delay_cells(row: Row) -> list[str]:
    """One line of the table of delays."""
    _, *figures = cells(row)
    return [f"{row.workload}: events after {row.delay_s:g} s", *figures]


def verdict_cells(verdict: Verdict) -> list[str]:
    """One target."""
    met = "yes" if verdict.is_met else "MISSED"
    return [verdict.check, f"{verdict.found:.3f}", f"{verdict.most:g}", met]


def draw(found: report.Report, table: Sequence[Row], late: Sequence[Row]) -> None:
    """`routing_ttft.png`, bars of the mean up to p90, and `routing_delay.png`."""
    # Where everything waits for one node there is no bar to draw.
    shown = [row for row in table if row.policy != "longest_prefix"]
    bars: dict[str, list[Spread]] = {}
    for row in shown:
        mean = row.outcome.mean_s
        bars.setdefault(row.policy, []).append(Spread(mean, mean, max(mean, row.outcome.p90_s)))
    labels = list(dict.fromkeys(row.workload for row in shown))
    grouped_bars(found.plot("routing_ttft"), labels, bars, ylabel="TTFT, s: mean, p90")
    panels: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for row in late:
        line = panels.setdefault(row.workload, {}).setdefault(row.policy, [])
        line.append((row.delay_s, 100 * row.outcome.hit_share))
    curves(found.plot("routing_delay"), panels, xlabel="event delay, s", ylabel="hits, %")


def main(
    *,
    nodes: Annotated[int, typer.Option(min=2, help="P nodes, and as many D nodes.")] = 8,
    utilisation: Annotated[float, typer.Option(min=0.1, help="Of P, under least_loaded.")] = 0.9,
    delay: Annotated[float, typer.Option(min=0, help="Seconds from event to index.")] = 0.1,
    loss: Annotated[float, typer.Option(min=0, max=0.5, help="Share of lost batches.")] = 0.0,
    trace: Annotated[Path | None, typer.Option(help="A Mooncake JSON-lines file instead.")] = None,
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Hits and TTFT of routing policies on the real index, with fake compute."""
    found = report.Report("routing", out, TIME_S, cpu="all", quick=quick)
    policies = list(ALL_POLICIES)
    cluster = Cluster(nodes, utilisation, NODE_BYTES, EventPath(delay, loss))
    length = QUICK_SECONDS if quick else SECONDS
    try:
        streams = cluster.load(length) if trace is None else read(trace, length)
    except (TraceError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    delays = (NO_DELAY, JUDGED_DELAY) if quick else DELAYS
    with report.progress(
        found.console, len(streams) * (1 + len(policies)) + len(delays)
    ) as describe:
        rows = measure(cluster, streams, policies, delays=delays, describe=describe)
    swept = slice(len(policies), len(policies) + len(delays))
    late = rows[swept]
    del rows[swept]
    note = f"{nodes} P and {nodes} D, {length:g} s of arrivals; {machine.describe(found.host)}"
    title = f"Routing at {utilisation:g} utilisation"
    found.publish(title, headers=HEADERS, rows=list(map(cells, rows)), note=note)
    lines = list(map(delay_cells, late))
    found.publish("Event delay", headers=HEADERS, rows=lines, note=note)
    judged = list(map(verdict_cells, verdicts([*rows, *late], delay)))
    # In a minute few sessions go on.
    if judged and not quick:
        found.publish("Targets", headers=VERDICT_HEADERS, rows=judged, note=note)
    draw(found, rows, late)
    found.save({"rows": rows, "delays": late})


if __name__ == "__main__":
    typer.run(main)
