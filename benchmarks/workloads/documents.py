"""G2, documents: questions about long documents beside short chats; prompts part ways deep inside.

Most hits of a document need a state where its questions begin, which no block boundary marks.
"""

from collections.abc import Iterator

from benchmarks.workloads.streams import Draw, Turn, next_turn, records_of
from benchmarks.workloads.traces import STAMP_S, Record

DOCUMENTS = 150
ASKED = (2, 3, 4, 6, 10)
ASKED_WITHIN_S = 250.0
CHATS = 1500
CHATS_S = 1000.0


def documents(scale: float = 1.0, seed: int = 0) -> list[Record]:
    """150 documents asked 2 to 10 times with other questions, 1,500 short chats, at scale 1."""
    draw = Draw(seed)
    turns: list[Turn] = []
    for number in range(round(DOCUMENTS * scale)):
        start = draw.random.uniform(0, CHATS_S - ASKED_WITHIN_S)
        document = draw.text(draw.random.uniform(10_000, 50_000))
        for _ in range(ASKED[number % len(ASKED)]):
            question = draw.text(draw.random.uniform(20, 900))
            at = start + draw.random.uniform(0, ASKED_WITHIN_S)
            turns.append(Turn(at, len(turns), (document, question), draw.output()))
    for session in range(len(turns), len(turns) + round(CHATS * scale)):
        turns += _chat(draw, session)
    return records_of(turns, grid_s=STAMP_S)


def _chat(draw: Draw, session: int) -> Iterator[Turn]:
    at = draw.random.uniform(0, CHATS_S)
    turn = Turn(at, session, (draw.text(draw.lognormal(1200, 0.7)),), draw.output())
    yield turn
    for _ in range(draw.random.randint(0, 5)):
        turn = next_turn(draw, turn, draw.lognormal(250, 0.8), gap=draw.lognormal(30, 0.8))
        yield turn
