"""One request of a soak, asked in one of four manners, and the verdict on its answer."""

import asyncio
import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from http import HTTPStatus
from time import monotonic
from typing import Any

import aiohttp

from benchmarks.robustness.soak.workload import Question, said_by

HANG_S = 20.0
"""A longer silence is a promise broken, whatever comes after it."""
GIVE_UP_S = 90.0
SLOW_READ_S = (0.02, 0.4)
MANNERS = ("whole", "stream", "slow", "leaves")
BUSY = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.GATEWAY_TIMEOUT)


class Verdict(StrEnum):
    """How one answer ended. The promise: none of those after `ERROR`."""

    EQUAL = "equal"
    CANCELLED = "cancelled, equal so far"
    ERROR = "explicit error"
    DIFFERENT = "different"
    TRUNCATED = "truncated without a word"
    REFUSED = "good request refused"
    BROKEN = "connection broke"


@dataclass(slots=True)
class Answer:
    """The outcome of one request; seconds are those in which the client waited for bytes.

    `asked_at` and `first_at`, that of the first token, are monotonic.
    """

    manner: str
    kind: str
    verdict: Verdict = Verdict.TRUNCATED
    cause: str = ""
    silence_s: float = 0.0
    total_s: float = 0.0
    asked_at: float = field(default_factory=monotonic)
    first_at: float = math.inf
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    is_done: bool = False

    def add(self, choice: Mapping[str, Any]) -> None:
        """A whole choice, or a part of a streamed one."""
        said = said_by(choice)
        self.tokens += said.tokens
        self.text += said.text
        self.finish_reason = said.finish_reason or self.finish_reason

    @property
    def hung(self) -> bool:
        """Whether the client waited longer for a byte than anybody should."""
        return self.silence_s > HANG_S


async def ask(
    http: aiohttp.ClientSession, question: Question, draw: random.Random, *, manner: str
) -> Answer:
    """Sends `question` in one of `MANNERS`. Raises nothing that a server may cause."""
    answer = Answer(manner, question.kind)
    try:
        async with asyncio.timeout(GIVE_UP_S):
            if answer.manner == "whole":
                await _whole(http, question, answer)
            else:
                await _stream(http, question, answer, draw=draw)
    except TimeoutError:
        answer.verdict, answer.cause = Verdict.BROKEN, f"nothing more for {GIVE_UP_S:g} s"
        answer.silence_s = max(answer.silence_s, GIVE_UP_S)
    except aiohttp.ClientError as error:
        answer.verdict, answer.cause = Verdict.BROKEN, f"{type(error).__name__}: {error}"
    answer.total_s = monotonic() - answer.asked_at
    return answer


async def _whole(http: aiohttp.ClientSession, question: Question, answer: Answer) -> None:
    sent = monotonic()
    async with http.post(question.path, json=question.body) as reply:
        body = await reply.json()
        answer.silence_s = monotonic() - sent
        if reply.status != HTTPStatus.OK:
            return _refused(answer, reply.status, body)
    answer.add(body["choices"][0])
    answer.first_at = monotonic()
    answer.is_done = True
    _compare(question, answer)


async def _stream(
    http: aiohttp.ClientSession, question: Question, answer: Answer, *, draw: random.Random
) -> None:
    leaves_after = (
        draw.randint(0, len(question.expected.tokens)) if answer.manner == "leaves" else None
    )
    sent = monotonic()
    async with http.post(question.path, json={**question.body, "stream": True}) as reply:
        answer.silence_s = monotonic() - sent
        if reply.status != HTTPStatus.OK:
            return _refused(answer, reply.status, await reply.json())
        while line := await _next_line(reply, answer):
            if _take(line, answer):
                break
            if leaves_after is not None and len(answer.tokens) >= leaves_after:
                answer.verdict = Verdict.CANCELLED
                reply.close()
                break
            if answer.manner == "slow":
                await asyncio.sleep(draw.uniform(*SLOW_READ_S))
    _compare(question, answer)


async def _next_line(reply: aiohttp.ClientResponse, answer: Answer) -> bytes:
    waited_from = monotonic()
    line = await reply.content.readline()
    answer.silence_s = max(answer.silence_s, monotonic() - waited_from)
    return line


def _take(line: bytes, answer: Answer) -> bool:
    """Notes what one line of the stream says; whether it is the last."""
    if line.startswith(b"data: [DONE]"):
        answer.is_done = True
        return True
    if not line.startswith(b"data: "):
        return False
    event = json.loads(line[6:])
    if "error" in event:
        answer.verdict, answer.cause = Verdict.ERROR, f"in the stream: {_shortened(event)}"
        return True
    answer.first_at = min(answer.first_at, monotonic())
    for choice in event["choices"]:
        answer.add(choice)
    return False


def _refused(answer: Answer, status: int, body: dict[str, object]) -> None:
    is_busy = status in BUSY or status >= HTTPStatus.INTERNAL_SERVER_ERROR
    answer.verdict = Verdict.ERROR if is_busy else Verdict.REFUSED
    answer.cause = f"{status}: {_shortened(body)}"


def _compare(question: Question, answer: Answer) -> None:
    """Also what came before an error or a client's own end must be right."""
    expected = question.expected
    right = expected.tokens[: len(answer.tokens)] == tuple(answer.tokens)
    right = right and expected.text.startswith(answer.text)
    if answer.is_done:
        said = (tuple(answer.tokens), answer.text, answer.finish_reason)
        right = said == (expected.tokens, expected.text, expected.finish_reason)
    if not right:
        answer.verdict = Verdict.DIFFERENT
        answer.cause = f"{answer.kind}: {answer.text[-80:]!r} beside {expected.text[-80:]!r}"
    elif answer.is_done:
        answer.verdict = Verdict.EQUAL


def _shortened(body: object) -> str:
    """Errors of one kind in one row: without the numbers in it."""
    error = body.get("error") if isinstance(body, dict) else None
    message = str(error.get("message")) if isinstance(error, dict) else str(body)
    return "".join("#" if char.isdigit() else char for char in message)[:100]
