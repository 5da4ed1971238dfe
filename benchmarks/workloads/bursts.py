"""G5, bursts: requests without anything in common whose arrivals are Poisson, or come in bursts."""

from benchmarks.workloads.streams import Draw, Turn, records_of
from benchmarks.workloads.traces import Record

REQUESTS = 8_819
PER_S = 2.57
INPUT, MAX_INPUT = (1_469.0, 0.985), 7_437
OUTPUT = (13.0, 1.125)
"""Median and sigma of lognormals, from the published p50 and p90."""


def bursts(scale: float = 1.0, seed: int = 0, *, cv: float = 13.0) -> list[Record]:
    """As many requests as the published trace has at scale 1; `cv`: of the gaps between them."""
    draw = Draw(seed)
    shape = 1 / cv**2
    turns, at = [], 0.0
    for _ in range(max(1, round(REQUESTS * scale))):
        at += draw.random.gammavariate(shape, 1 / (shape * PER_S))
        prompt = draw.text(min(draw.lognormal(*INPUT), MAX_INPUT))
        output = max(1, round(draw.lognormal(*OUTPUT)))
        turns.append(Turn(at, None, (prompt,), output))
    return records_of(turns, grid_s=0)
