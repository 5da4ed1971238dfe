"""Are answers through Tandem's proxy those of vLLM's toy proxy, and of a vLLM node alone?"""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import msgspec

from benchmarks.load.reply import Reply
from benchmarks.load.request import Request
from benchmarks.serving.vllm_workers import fronts
from benchmarks.serving.vllm_workers.asking import answers, request_of, some_ids
from benchmarks.serving.vllm_workers.fronts import Front, Stack
from benchmarks.support.vllm_peer import Workers

HEADERS = ("model", "through", "answers", "equal to the toy's", "to a node's alone", "failed", "s")
# Around blocks of 128 tokens, and one and two tokens, of which a hybrid's P computes none and one.
LENGTHS = (1, 2, 7, 64, 127, 128, 129, 300, 700, 1000)
SHARED, PREFIXES, SHARES = 256, 4, 3
OUTPUT = 24
AT_ONCE = 4
SEED = 32

Replies = Sequence[Reply]


class Difference(msgspec.Struct, frozen=True):
    """An answer that is not that of one node alone."""

    place: int
    num_prompt_tokens: int
    expected: tuple[int, ...]
    got: tuple[int, ...]
    seconds: float


class Row(msgspec.Struct, frozen=True):
    """One model through one front; seconds of wall time."""

    model: str
    through: str
    answers: int
    equal_to_toy: int
    equal_to_alone: int
    failed: int
    seconds: float
    errors: tuple[str, ...]
    different: tuple[Difference, ...]

    @property
    def holds(self) -> bool:
        """Whether every answer is that of one node alone."""
        return self.equal_to_alone == self.answers


def prompts(count: int, seed: int = SEED) -> list[Request]:
    """All LENGTHS by turns; one in SHARES begins with one of PREFIXES of SHARED tokens."""
    draw = random.Random(seed)
    prefixes = [some_ids(draw, SHARED) for _ in range(PREFIXES)]
    made = []
    for place in range(count):
        own = some_ids(draw, LENGTHS[place % len(LENGTHS)])
        head = () if place % SHARES else draw.choice(prefixes)
        made.append(request_of((*head, *own), OUTPUT))
    return made


async def measure(
    stack: Stack,
    up: Workers,
    requests: Sequence[Request],
    *,
    model: str,
    tell: Callable[[str], None],
) -> list[Row]:
    """Asks D alone, then each proxy, for the same."""
    replies: dict[str, tuple[Replies, float]] = {}
    with ExitStack() as opened:
        proxies = (fronts.toy(stack, up), fronts.tandem(stack, up))
        those = [Front(fronts.ALONE, up.decode[0].url), *map(opened.enter_context, proxies)]
        for front in those:
            tell(f"{model}: {front.name}")
            began = time.perf_counter()
            found = await answers(front.url, requests, at_once=AT_ONCE)
            replies[front.name] = found, time.perf_counter() - began
    alone, of_toy = replies[fronts.ALONE][0], replies[fronts.TOY][0]
    return [
        Row(
            model=model,
            through=name,
            answers=len(got),
            equal_to_toy=count_equal(got, of_toy),
            equal_to_alone=count_equal(got, alone),
            failed=sum(bool(one.error) for one in got),
            seconds=seconds,
            errors=tuple(sorted({one.error for one in got if one.error})),
            different=differences(requests, got, alone),
        )
        for name, (got, seconds) in replies.items()
    ]


def differences(
    requests: Sequence[Request], got: Replies, alone: Replies
) -> tuple[Difference, ...]:
    """Answers that came without an error and differ."""
    return tuple(
        Difference(
            place,
            len(request.prompt),
            expected.token_ids,
            one.token_ids,
            one.e2el,
        )
        for place, (request, one, expected) in enumerate(zip(requests, got, alone, strict=True))
        if not one.error and not expected.error and one.token_ids != expected.token_ids
    )


def count_equal(these: Replies, those: Replies) -> int:
    """How many were both answered, with the same token ids."""
    pairs = zip(these, those, strict=True)
    return sum(
        not a.error and not b.error and bool(a.token_ids) and a.token_ids == b.token_ids
        for a, b in pairs
    )


def cells(row: Row) -> list[str]:
    """One line of the table."""
    counts = (row.answers, row.equal_to_toy, row.equal_to_alone, row.failed)
    return [row.model, row.through, *map(str, counts), f"{row.seconds:.0f}"]
