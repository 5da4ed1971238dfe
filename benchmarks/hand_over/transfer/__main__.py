"""`python -m benchmarks.hand_over.transfer`: what a pull costs beside memcpy and NIXL itself.

Two processes on this host, real arenas, the connector's own plans, reader and control service.

- memcpy: one thread, the same spans, from this process's own memory.
- raw nixl: a read of the same spans with NIXL's Python agent, one request, polled without a pause.
- shm, nixl, ucx, zmq: what a pull thread does: plan the spans from block tables, read, wait.
- verified: the same and D compares; P has hashed since its answer, which takes it less than a
  pause between the grant of a lease and the pull, of 0.25 s per GB, verified or not.

Both NIXL readers go without a progress thread, which would spin on a core that the others need.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from benchmarks.hand_over.transfer.cases import ARENA_BYTES, Case, prompts, sizes
from benchmarks.hand_over.transfer.peer import DEADLINE_S, ENGINE_ID, OURS, peer_addresses
from benchmarks.hand_over.transfer.ways import (
    Baseline,
    OnLoop,
    Pull,
    Read,
    event_loop,
    memcpy_read,
    raw_nixl_read,
)
from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread, alternate, turns
from benchmarks.support.plots import grouped_bars
from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.lease_record import REGION_BYTES
from connector.transports.base import Transport
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from serving.process import configure_logging

SECONDS = (600, 60)
SPEED, COST = 0.8, 0.15
WIDTH = 150
LARGE = 16 << 20
QUICK = "16 MiB, 16 x 1 MiB"
JUDGED = "256 MiB, 256 x 1 MiB"
BASELINES = ("memcpy", "raw nixl")
TARGETS = (("shm", "memcpy"), ("nixl", "raw nixl"))
SPEEDS = ("case", "MB", "spans", *BASELINES, *OURS, "shm / memcpy", "nixl / raw nixl", ">= 0.8")
TIMES = ("case", *BASELINES, *(f"{name}{way}" for name in OURS for way in ("", ", verified")))
WARMUPS = 2
NUM_WAYS = len(BASELINES) + 2 * len(OURS)
COSTS = ("case", *OURS, "nixl <= 15 %")


class Row(msgspec.Struct, frozen=True):
    """Seconds of every way, and ratios that were taken inside the rounds.

    `costs`: the share of its speed that a transport loses by verification.
    """

    case: str
    nbytes: int
    num_spans: int
    seconds: dict[str, Spread]
    ratios: dict[str, Spread]
    costs: dict[str, Spread]

    def speed(self, way: str) -> str:
        """GB/s, the median."""
        return f"{self.nbytes / 1e9 / self.seconds[way].median:.1f}"

    def micros(self, way: str) -> str:
        """Microseconds, the median."""
        return f"{1e6 * self.seconds[way].median:,.0f}"


def ways_of(
    case: Case,
    arena: ArenaMemory,
    control: ControlClient,
    *,
    on_loop: OnLoop,
    records: ArenaMemory,
    plain: Mapping[str, Read],
    ours: Sequence[Transport],
) -> dict[str, Callable[[], float]]:
    """Every way to move a case, by name."""
    ways: dict[str, Callable[[], float]]
    ways = {name: Baseline(arena, case, read) for name, read in plain.items()}
    for transport in ours:
        name = transport.name
        pull = partial(Pull, arena, records, case, transport, control, on_loop)
        ways[name] = pull(verify=False)
        ways[f"{name}, verified"] = pull(verify=True)
    return ways


def measure(
    case: Case,
    ways: Mapping[str, Callable[[], float]],
    rounds: int,
    *,
    until: float,
    done: Callable[[], None],
) -> Row:
    """All ways in `rounds` rounds, in turning order, until `until` (monotonic)."""
    found = alternate(ways, rounds, warmups=WARMUPS, until=until, done=done)
    return Row(
        case.name,
        case.nbytes,
        len(case.pull().spans),
        {name: Spread.of(seconds) for name, seconds in found.items()},
        {ours: Spread.of_ratio(found[other], found[ours]) for ours, other in TARGETS},
        {way: _cost(found, way) for way in found if "," in way},
    )


def _cost(found: Mapping[str, Sequence[float]], way: str) -> Spread:
    pairs = zip(found[way.partition(",")[0]], found[way], strict=True)
    return Spread.of([1.0 - plain / verified for plain, verified in pairs])


def run(cases: Sequence[Case], rounds: int, found: report.Report) -> list[Row]:
    """All cases, one after the other."""
    rows = []
    with ExitStack() as stack:
        arena = stack.enter_context(closing(ArenaMemory(ARENA_BYTES)))
        records = stack.enter_context(closing(ArenaMemory(REGION_BYTES)))
        addresses, ports = stack.enter_context(peer_addresses())
        plain = {"memcpy": memcpy_read(arena)}
        ours = []
        for name in OURS:
            ours.append(stack.enter_context(closing(open_transport(name, "bench-d"))))
            ours[-1].register(arena, records)
            ours[-1].connect(ENGINE_ID, addresses[name])
            if name == "nixl":  # both before ucx, whose other UCX would make them use TCP
                plain["raw nixl"] = raw_nixl_read(arena, addresses["nixl"])
        on_loop = stack.enter_context(event_loop())
        total = len(cases) * NUM_WAYS * turns(rounds, WARMUPS)
        tell = stack.enter_context(report.progress(found.console, total))
        for number, case in enumerate(cases):
            address = f"127.0.0.1:{ports[case.name]}"
            control = on_loop(_client_of(address))
            ways = ways_of(
                case, arena, control, on_loop=on_loop, records=records, plain=plain, ours=ours
            )
            until, done = found.share(len(cases) - number), tell(case.name)
            rows.append(measure(case, ways, rounds, until=until, done=done))
            on_loop(control.close())
    return rows


async def _client_of(address: str) -> ControlClient:
    """On the loop that runs this."""
    return ControlClient(address, token=None, caller_engine_id="d", timeout_s=DEADLINE_S)


def speed_cells(row: Row) -> list[str]:
    """One line about speed."""
    met = all(row.ratios[ours].median >= SPEED for ours, _ in TARGETS)
    speeds = [row.speed(way) for way in (*BASELINES, *OURS)]
    ratios = [row.ratios[ours].show() for ours, _ in TARGETS]
    shown = [row.case, f"{row.nbytes / 1e6:,.3g}", str(row.num_spans), *speeds, *ratios]
    return [*shown, "met" if met else "MISSED"]


def time_cells(row: Row) -> list[str]:
    """One line in microseconds."""
    ways = [f"{name}{way}" for name in OURS for way in ("", ", verified")]
    return [row.case, *(row.micros(way) for way in (*BASELINES, *ways))]


def cost_cells(row: Row) -> list[str]:
    """One line about verification."""
    judged = "met" if row.costs["nixl, verified"].median <= COST else "MISSED"
    shown = [row.costs[f"{name}, verified"].show() for name in OURS]
    return [row.case, *shown, judged if row.case == JUDGED else "not judged"]


def publish(found: report.Report, rows: Sequence[Row], num_prompts: int, *, note: str) -> None:
    """Three tables."""
    by_prompt, by_size = rows[:num_prompts], rows[num_prompts:]
    cells = list(map(speed_cells, by_prompt))
    found.publish("Prompts, GB/s", headers=SPEEDS, rows=cells, note=note)
    cells = list(map(time_cells, by_size))
    found.publish("Sizes, microseconds", headers=TIMES, rows=cells, note=note)
    cells = [cost_cells(row) for row in by_size if row.nbytes >= LARGE]
    found.publish("Cost of verification", headers=COSTS, rows=cells, note=note)


def draw(file: Path, rows: Sequence[Row]) -> None:
    """GB/s of all ways."""
    names = [*BASELINES, *OURS, "nixl, verified"]
    speeds = {
        name: [
            Spread(*(row.nbytes / 1e9 / s for s in (found.median, found.high, found.low)))
            for row in rows
            for found in [row.seconds[name]]
        ]
        for name in names
    }
    grouped_bars(file, [row.case for row in rows], speeds, ylabel="GB/s")


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after two.")] = 9,
    cpu: Annotated[str, typer.Option(help="Cores to run on, as `0,1`, or `all`.")] = "all",
    target: report.OwnServers = "",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Every transport beside memcpy and beside raw NIXL, verified and not, in one run."""
    found = report.Report("transfer", out, SECONDS, cpu=cpu, quick=quick)
    found.console.width = max(found.console.width, WIDTH)
    configure_logging("warning")
    by_prompt, by_size = prompts(), sizes()
    if quick:
        rounds, by_prompt, by_size = 1, by_prompt[:1], [one for one in by_size if one.name == QUICK]
    rows = run(by_prompt + by_size, rounds, found)
    note = f"median of at most {rounds} rounds; {machine.describe(found.host)}"
    publish(found, rows, len(by_prompt), note=note)
    draw(found.plot(), rows)
    found.save(rows)


if __name__ == "__main__":
    typer.run(main)
