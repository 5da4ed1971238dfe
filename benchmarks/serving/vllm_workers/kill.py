"""A vLLM worker is killed under streams: does each go on, or end with an error, never silently?

And does vLLM have all of its blocks back when its lease of 30 s is over?
"""

import asyncio
import itertools
import random
import time
from collections.abc import Callable, Mapping, Sequence

import msgspec

from benchmarks.load.reply import Reply
from benchmarks.serving.vllm_workers.asking import answers, request_of, some_ids
from benchmarks.serving.vllm_workers.fronts import Front
from benchmarks.support.vllm_peer import VllmError, Worker, Workers

HEADERS = (
    *("through", "killed", "streams", "continued", "untouched", "errors", "**silent or wrong**"),
    *("longest silence, s", "blocks back after, s"),
)
STREAMS = 16
PROMPT, OUTPUT = 500, 96
LEASE_S = 30.0
SETTLE_S = 3 * LEASE_S
POLL_S = 0.1
# How far all streams together are when the kill comes: P has computed a fifth of the prompts, or
# one D of two has made an eighth of the tokens.
MOMENTS = {
    "P": ("vllm:prompt_tokens_total", STREAMS * PROMPT // 5),
    "D": ("vllm:generation_tokens_total", STREAMS * OUTPUT // 8),
}


class Row(msgspec.Struct, frozen=True):
    """One kill. `wrong`: answers that ended without an error and are not the undisturbed ones.

    `continued`: equal ones that were under way at the kill; `untouched`: equal, and ended before
    it. `back_s`: seconds from the last answer until no living worker held a block; None if one
    still did after SETTLE_S.
    """

    through: str
    killed: str
    streams: int
    continued: int
    untouched: int
    errors: int
    wrong: int
    silence_s: float
    back_s: float | None
    said: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether nothing was wrong, and every block came back."""
        return not self.wrong and self.back_s is not None


async def measure(
    front: Front, up: Workers, role: str, *, tell: Callable[[str], None], seed: int
) -> Row:
    """Kills the first worker of a role ("P", "D") under STREAMS streams, and starts it again."""
    draw = random.Random(seed)
    requests = [request_of(some_ids(draw, PROMPT), OUTPUT) for _ in range(STREAMS)]
    victim = (up.prefill if role == "P" else up.decode)[0]
    tell(f"{front.name}: undisturbed")
    calm = await answers(front.url, requests, at_once=STREAMS)
    if errors := {one.error for one in calm if one.error}:
        raise VllmError(f"{front.name} fails undisturbed: {errors}")
    # Other prompts would have other answers, and the same ones are cached: the salt tells apart.
    salted = [
        msgspec.structs.replace(one, sampling={**one.sampling, "cache_salt": f"kill {seed}"})
        for one in requests
    ]
    tell(f"{front.name}: {victim.name} is killed under streams")
    before = victim.samples()
    asked = asyncio.create_task(answers(front.url, salted, at_once=STREAMS))
    await _far_enough(victim, role, before=before, asked=asked)
    killed = time.perf_counter()
    await asyncio.to_thread(victim.kill)
    broken = await asked
    tell(f"{front.name}: waits for blocks")
    back = await _blocks_back([one for one in up.all if one is not victim])
    victim.launch()
    await asyncio.to_thread(victim.wait)
    pairs = list(zip(calm, broken, strict=True))
    return _row((front.name, victim.name), pairs, at=killed, back_s=back)


async def _far_enough(
    victim: Worker, role: str, *, before: Mapping[str, float], asked: asyncio.Task[list[Reply]]
) -> None:
    """Raises VllmError where all streams have ended before that."""
    counter, enough = MOMENTS[role]
    while not asked.done():
        now = await asyncio.to_thread(victim.samples)
        if now[counter] - before[counter] >= enough:
            return
        await asyncio.sleep(POLL_S)
    raise VllmError(f"{victim.name} was not asked for enough: {counter} is below {enough}")


async def _blocks_back(living: Sequence[Worker]) -> float | None:
    began = time.monotonic()
    while time.monotonic() < began + SETTLE_S:
        held = [await asyncio.to_thread(one.usage) for one in living]
        if not any(held):
            return time.monotonic() - began
        await asyncio.sleep(POLL_S)
    return None


def _row(
    names: tuple[str, str], pairs: Sequence[tuple[Reply, Reply]], *, at: float, back_s: float | None
) -> Row:
    answered = [(calm, got) for calm, got in pairs if not got.error]
    equal = [got for calm, got in answered if got.token_ids == calm.token_ids]
    return Row(
        through=names[0],
        killed=names[1],
        streams=len(pairs),
        continued=sum(got.ended > at for got in equal),
        untouched=sum(got.ended <= at for got in equal),
        errors=len(pairs) - len(answered),
        wrong=len(answered) - len(equal),
        silence_s=max((_silence(got, at) for _, got in pairs if got.ended > at), default=0.0),
        back_s=back_s,
        said=tuple(sorted({got.error for _, got in pairs if got.error})),
    )


def _silence(reply: Reply, at: float) -> float:
    """The longest gap of a stream that ends after `at`, its end included."""
    times = [max(at, reply.sent), *(one for one in reply.chunks if one > at), reply.ended]
    return max(late - early for early, late in itertools.pairwise(times))


def cells(row: Row) -> list[str]:
    """One line of the table."""
    counts = (row.streams, row.continued, row.untouched, row.errors, row.wrong)
    back = "never" if row.back_s is None else f"{row.back_s:.1f}"
    return [row.through, row.killed, *map(str, counts), f"{row.silence_s:.1f}", back]
