"""G1, conversations: long first prompts, sessions that go on, one system prompt that all share.

Made to resemble Mooncake's one-hour trace of an online chat. A smaller `scale` thins the stream:
fewer sessions in the same time.
"""

from collections.abc import Iterator
from itertools import chain, count, repeat

from benchmarks.workloads.streams import HOUR_S, SYSTEM, Draw, Turn, next_turn, records_of
from benchmarks.workloads.traces import STAMP_S, Record

MAX_PROMPT = 126_000
SESSIONS_PER_S = 0.61 * 3.4
GO_ON = (0.33, 0.42, 0.48, 0.53)
GO_ON_AFTERWARDS = 0.58


def conversation(scale: float = 1.0, seed: int = 0) -> list[Record]:
    """One hour; 12,000 requests of 12,000 tokens in the mean at scale 1."""
    draw = Draw(seed)
    turns: list[Turn] = []
    at, rate = 0.0, SESSIONS_PER_S * scale
    for session in count():
        at += draw.random.expovariate(rate)
        if at >= HOUR_S:
            break
        turns += _session(draw, at, session)
    return records_of([turn for turn in turns if turn.at < HOUR_S], grid_s=STAMP_S)


def _session(draw: Draw, at: float, session: int) -> Iterator[Turn]:
    first = min(draw.lognormal(5400, 1.2), MAX_PROMPT) - SYSTEM[1]
    turn = Turn(at, session, (SYSTEM, draw.text(first)), draw.output())
    for chance in chain(GO_ON, repeat(GO_ON_AFTERWARDS)):
        yield turn
        turn = next_turn(draw, turn, draw.lognormal(500, 1.5), gap=draw.lognormal(125, 1.1))
        if draw.random.random() >= chance or turn.input_length > MAX_PROMPT:
            return
