"""The requests of a soak, and what one undisturbed node answers to each of them."""

import random
from collections.abc import Sequence
from typing import Any

import aiohttp
import msgspec

from benchmarks.demo_model.text import NAMES, story

NAME = "soak"
MAX_STORIES = 24
OUTPUT_TOKENS = (1, 4, 16, 48, 96)
REFERENCE_TIMEOUT_S = 120.0


class Question(msgspec.Struct, frozen=True):
    """One request body, and the tokens that are the only right answer to it."""

    body: dict[str, Any]
    expected: tuple[int, ...] = ()


def questions(count: int, seed: int) -> list[Question]:
    """`count` different requests: prompts that share beginnings, greedy and seeded sampling."""
    draw = random.Random(seed)
    return [Question(_body(draw, number)) for number in range(count)]


def _body(draw: random.Random, number: int) -> dict[str, Any]:
    """Three prompts each share a beginning, so that nodes have prefix hits."""
    teller = random.Random(number // 3)
    stories = [story(teller, teller.choice(NAMES))[0] for _ in range(MAX_STORIES)]
    prompt = " ".join(stories[: draw.randint(1, MAX_STORIES)])
    sampling = {"temperature": 0} if number % 2 else {"temperature": 0.9, "seed": number}
    return {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": draw.choice(OUTPUT_TOKENS),
        "ignore_eos": True,
        "return_token_ids": True,
        **sampling,
    }


async def with_answers(url: str, asked: Sequence[Question]) -> list[Question]:
    """The same questions with the answers of the node at `url`, asked one after the other."""
    timeout = aiohttp.ClientTimeout(total=REFERENCE_TIMEOUT_S)
    answered = []
    async with aiohttp.ClientSession(url, timeout=timeout, raise_for_status=True) as http:
        for question in asked:
            async with http.post("/v1/completions", json=question.body) as reply:
                body = await reply.json()
            expected = tuple(body["choices"][0]["token_ids"])
            answered.append(Question(question.body, expected))
    return answered
