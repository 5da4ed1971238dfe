"""G3, coding agents: steps that each add a little to a long prompt, after tools or after people.

Each of N users has a few sessions, one after the other; a closed loop sends them as answers come.
The stamps are what they would be with answers of `TOKENS_PER_S`.
"""

from collections.abc import Iterator, Sequence

from benchmarks.workloads.streams import Draw, Turn, records_of
from benchmarks.workloads.traces import Record, Segment

USERS = 20
SESSIONS_PER_USER = 3
STARTS_WITHIN_S = 600.0
VARIANTS, VARIANT_TOKENS = 4, 16_384
REQUESTS, STEPS = 9.5, 8.8
"""Means: requests of a session, steps of a request."""
PERSON_GAP, TOOL_GAP = (84.0, 2.1), (0.285, 3.0)
ADDED, ANSWERED = (400.0, 1.48), (215.0, 1.31)
"""Median and sigma of lognormals."""
MAX_CONTEXT = 200_000
COMPACTED = (40_000, 60_000)
TOKENS_PER_S = 40.0


def coding_agent(scale: float = 1.0, seed: int = 0) -> list[Record]:
    """60 sessions of 20 users at scale 1; fewer users at a smaller one."""
    draw = Draw(seed)
    variants = [draw.text(VARIANT_TOKENS) for _ in range(VARIANTS)]
    turns: list[Turn] = []
    for user in range(max(1, round(USERS * scale))):
        at = draw.random.uniform(0, STARTS_WITHIN_S)
        for number in range(SESSIONS_PER_USER):
            session = user * SESSIONS_PER_USER + number
            turns += _session(draw, at, session, variants=variants)
            at = _ended(turns[-1]) + draw.lognormal(*PERSON_GAP)
    return records_of(turns, grid_s=0)


def _session(draw: Draw, at: float, session: int, *, variants: Sequence[Segment]) -> Iterator[Turn]:
    variant = draw.random.choice(variants)
    segments: tuple[Segment, ...] = (variant, draw.text(draw.lognormal(*ADDED)))
    turn = Turn(at, session, segments, _answered(draw))
    yield turn
    for gap in list(_gaps(draw))[1:]:
        added = (draw.text(turn.output_length), draw.text(draw.lognormal(*ADDED)))
        segments = (*turn.segments, *added)
        if sum(size for _, size in segments) > MAX_CONTEXT:
            summary = draw.random.uniform(*COMPACTED) - VARIANT_TOKENS
            segments = (variant, draw.text(summary))
        turn = Turn(_ended(turn) + gap, session, segments, _answered(draw), gap)
        yield turn


def _gaps(draw: Draw) -> Iterator[float]:
    """Seconds before each step: a person's before a request, a tool's before its other steps."""
    for _ in range(draw.geometric(REQUESTS)):
        yield draw.lognormal(*PERSON_GAP)
        for _ in range(draw.geometric(STEPS) - 1):
            yield draw.lognormal(*TOOL_GAP)


def _answered(draw: Draw) -> int:
    return max(1, round(draw.lognormal(*ANSWERED)))


def _ended(turn: Turn) -> float:
    return turn.at + turn.output_length / TOKENS_PER_S
