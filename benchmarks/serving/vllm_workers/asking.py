"""Greedy requests of token ids, and their answers from one server."""

import random
from collections.abc import Callable, Sequence

from benchmarks.load.client import Client
from benchmarks.load.loop import Pace, drive
from benchmarks.load.reply import Reply
from benchmarks.load.request import WITH_IDS, Request
from benchmarks.support.vllm_peer import NAME, VOCABULARY

Ids = tuple[int, ...]
# A busy machine makes a request of vLLM's CPU build wait for half a minute.
DEADLINE_S = 1200.0


async def answers(
    url: str,
    requests: Sequence[Request],
    *,
    at_once: int,
    done: Callable[[], None] = lambda: None,
) -> list[Reply]:
    """The replies in the order of `requests`; an error stands in its reply."""
    async with Client(url, NAME) as client:
        pace = Pace(at_once=at_once, deadline_s=DEADLINE_S)
        run = await drive(client.send, requests, pace, done=done)
    return list(run.replies)


def request_of(prompt: Ids, tokens: int, session: str = "") -> Request:
    """A greedy one that goes on to `tokens`, and shows ids."""
    return Request(prompt=prompt, max_tokens=tokens, sampling=dict(WITH_IDS), session=session)


def some_ids(draw: random.Random, count: int) -> Ids:
    """Neither padding nor end of text."""
    return tuple(draw.randrange(2, VOCABULARY) for _ in range(count))
