"""Simulations: every policy on every workload at an equal load, event delays, and targets."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.cache.geometries import BLOCK_SIZE, GEOMETRIES
from benchmarks.cache.routing.event_feed import EventPath
from benchmarks.cache.routing.nodes import Hardware
from benchmarks.cache.routing.requests import GENERATORS, Request, requests_of
from benchmarks.cache.routing.simulator import Outcome, Simulator
from benchmarks.workloads.files import read_trace
from benchmarks.workloads.traces import TRACE_BLOCK

GEOMETRY = GEOMETRIES["Qwen3.5-4B"]
WARM_UP = 0.25
"""The share of requests that fill the caches and do not count."""
BASELINE, CANDIDATE = "least_loaded", "prefix_aware"
G1, TRAP = "G1 conversation", "one shared block"
MOST_OF_BASELINE = 0.6
MOST_ON_TRAP = 1.1
MOST_LOST = 0.02
DELAYS = (0.01, 1.0, 5.0, 30.0, 120.0)
NO_DELAY, JUDGED_DELAY = 0.01, 5.0


class Row(msgspec.Struct, frozen=True):
    """One policy on one workload; `delay_s`: from a node's event to the index."""

    workload: str
    policy: str
    delay_s: float
    outcome: Outcome


class Verdict(msgspec.Struct, frozen=True):
    """A target of the project and what was found."""

    check: str
    found: float
    most: float

    @property
    def is_met(self) -> bool:
        """Whether `found` is at most `most`."""
        return self.found <= self.most


@dataclass(slots=True, frozen=True)
class Cluster:
    """As many prefill as decode nodes. `utilisation`: of P, under the baseline; see `rate`."""

    num_nodes: int
    utilisation: float
    memory_bytes: int
    path: EventPath
    seed: int = 0

    def load(self, seconds: float) -> dict[str, list[Request]]:
        """The first `seconds` of the generated workloads; more nodes get more sessions."""
        made = {}
        for name, (make, scale) in GENERATORS.items():
            records = make(scale * self.num_nodes / 8, self.seed)
            first = [record for record in records if record.timestamp < 1000 * seconds]
            made[name] = requests_of(first, BLOCK_SIZE)
        return made

    def hardware(self, requests: Sequence[Request], hash_block_size: int) -> Hardware:
        """Nodes at whose rate the baseline, with the hits that it finds, keeps P so busy.

        Both by the requests that count. Hits of a policy that does not look for them hardly depend
        on the rate: one run tells.
        """
        counted = requests[round(WARM_UP * len(requests)) :]
        tokens = sum(request.prompt.num_tokens for request in counted)
        seconds = counted[-1].at - counted[0].at
        rate = tokens / (self.utilisation * self.num_nodes * seconds)
        hardware = Hardware(GEOMETRY, self.memory_bytes, rate, hash_block_size)
        hit_share = self.run(BASELINE, requests, hardware).hit_share
        return replace(hardware, prefill_tokens_per_s=rate * (1 - hit_share))

    def run(self, policy: str, requests: Sequence[Request], hardware: Hardware) -> Outcome:
        """One policy on caches that begin empty."""
        simulator = Simulator(policy, self.num_nodes, hardware, path=self.path, seed=self.seed)
        served = simulator.run(requests)
        return Outcome.of(served[round(WARM_UP * len(served)) :], simulator.num_repairs)


def read(trace: Path, seconds: float) -> dict[str, list[Request]]:
    """The first `seconds` of a trace's file. Raises TraceError."""
    records = read_trace(trace)
    end = records[0].timestamp + 1000 * seconds
    first = [record for record in records if record.timestamp < end]
    return {trace.stem: requests_of(first, TRACE_BLOCK)}


def measure(
    cluster: Cluster,
    streams: Mapping[str, Sequence[Request]],
    policies: Sequence[str],
    *,
    delays: Sequence[float],
    describe: Callable[[str], Callable[[], None]],
) -> list[Row]:
    """Every policy on every workload, and the candidate on the first one at every delay."""
    rows: list[Row] = []
    for workload, requests in streams.items():
        done = describe(f"{workload}, rate")
        size = requests[0].prompt.prefix.hash_block_size
        hardware = cluster.hardware(requests, size)
        done()
        runs = [(policy, cluster.path.delay_s) for policy in policies]
        runs += [(CANDIDATE, delay) for delay in delays if not rows]
        made = []
        for policy, delay in runs:
            done = describe(f"{workload}, {policy}, events after {delay:g} s")
            late = replace(cluster, path=replace(cluster.path, delay_s=delay))
            made.append(Row(workload, policy, delay, late.run(policy, requests, hardware)))
            done()
        rows += made
    return rows


def verdicts(rows: Sequence[Row], delay_s: float) -> list[Verdict]:
    """The project's targets, as far as their rows are there; `delay_s`: of the table's rows."""
    found = {(row.workload, row.policy, row.delay_s): row.outcome for row in rows}
    made = []
    for workload, most in ((G1, MOST_OF_BASELINE), (TRAP, MOST_ON_TRAP)):
        ours, theirs = (found.get((workload, p, delay_s)) for p in (CANDIDATE, BASELINE))
        if ours and theirs:
            check = f"{workload}: mean TTFT, {CANDIDATE} to {BASELINE}"
            made.append(Verdict(check, ours.mean_s / theirs.mean_s, most))
            if workload == TRAP:
                check = f"{workload}: busiest node, {CANDIDATE} to {BASELINE}"
                made.append(Verdict(check, ours.busiest / theirs.busiest, 2.0))
    at_once, late = (found.get((G1, CANDIDATE, delay)) for delay in (NO_DELAY, JUDGED_DELAY))
    if at_once and late:
        lost = at_once.hit_share - late.hit_share
        made.append(Verdict(f"{G1}: hit share lost at 5 s of event delay", lost, MOST_LOST))
    return made
