"""G4, API fan-out: few system prompts, most of them asked again within seconds, and short tails."""

from benchmarks.workloads.streams import Draw, Turn, records_of
from benchmarks.workloads.traces import Record

SYSTEMS = 20
SYSTEM_TOKENS = (2_000, 8_000)
TAIL_TOKENS = (64, 512)
OUTPUT_TOKENS = (16, 128)
PER_S = 3.0
SECONDS = 1200.0


def fan_out(scale: float = 1.0, seed: int = 0) -> list[Record]:
    """20 minutes; 3,600 requests at scale 1. A smaller scale is a shorter time at equal rate."""
    draw = Draw(seed)
    systems = [draw.text(draw.random.uniform(*SYSTEM_TOKENS)) for _ in range(SYSTEMS)]
    weights = [1 / rank for rank in range(1, SYSTEMS + 1)]  # Zipf with exponent 1
    turns, at = [], 0.0
    while (at := at + draw.random.expovariate(PER_S)) < scale * SECONDS:
        (system,) = draw.random.choices(systems, weights)
        segments = (system, draw.text(draw.random.uniform(*TAIL_TOKENS)))
        turns.append(Turn(at, None, segments, draw.random.randint(*OUTPUT_TOKENS)))
    return records_of(turns, grid_s=0)
