"""The requests of a soak, and what one undisturbed node answers to each of them."""

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import aiohttp
import msgspec

from benchmarks.demo_model.text import NAMES, story

NAME: Final = "soak"
MAX_STORIES: Final = 24
OUTPUT_TOKENS: Final = (1, 4, 16, 48, 96)
BOUND_TOKENS: Final = 120
"""Room for an answer that a grammar ends."""
REFERENCE_TIMEOUT_S: Final = 120.0
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
SCHEMA: Final = {
    "type": "object",
    "properties": {"who": {"enum": list(NAMES[:4])}, "happy": {"type": "boolean"}},
    "required": ["who", "happy"],
    "additionalProperties": False,
}
TOOL: Final = {"type": "function", "function": {"name": "meet", "parameters": SCHEMA}}

Body = dict[str, Any]


class Said(msgspec.Struct, frozen=True):
    """A whole answer: its tokens, its text or tool calls, and why it ended."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    finish_reason: str = ""


class Question(msgspec.Struct, frozen=True):
    """One request, and the only right answer to it."""

    kind: str
    path: str
    body: Body
    expected: Said = Said()


def _plain(_: random.Random, prompt: str) -> tuple[str, Body]:
    return COMPLETIONS, {"prompt": prompt}


def _penalties(draw: random.Random, prompt: str) -> tuple[str, Body]:
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
    return COMPLETIONS, {"prompt": prompt, **penalties, "logit_bias": {str(draw.randrange(99)): 2}}


def _schema(_: random.Random, prompt: str) -> tuple[str, Body]:
    form = {"type": "json_schema", "json_schema": {"name": "meeting", "schema": SCHEMA}}
    return COMPLETIONS, {"prompt": prompt, "response_format": form}


def _regex(draw: random.Random, prompt: str) -> tuple[str, Body]:
    pattern = f"[a-f]{{{draw.randint(2, 9)}}}(-[0-9]{{2}}){{1,{draw.randint(2, 12)}}}"
    return COMPLETIONS, {"prompt": prompt, "structured_outputs": {"regex": pattern}}


def _tools(draw: random.Random, prompt: str) -> tuple[str, Body]:
    path, body = _chat(draw, prompt)
    return path, {**body, "tools": [TOOL], "tool_choice": "required"}


def _chat(_: random.Random, prompt: str) -> tuple[str, Body]:
    return CHAT, {"messages": [{"role": "user", "content": prompt}]}


KINDS: Final[Mapping[str, Callable[[random.Random, str], tuple[str, Body]]]] = MappingProxyType(
    {
        "plain": _plain,
        "penalties": _penalties,
        "JSON schema": _schema,
        "regex": _regex,
        "forced tool call": _tools,
        "chat": _chat,
    }
)
BOUND: Final = frozenset({"JSON schema", "regex", "forced tool call"})


def questions(count: int, seed: int) -> list[Question]:
    """`count` different requests of all kinds; greedy and seeded sampling in turn.

    Three prompts each share a beginning, so that nodes have prefix hits.
    """
    draw, kinds = random.Random(seed), itertools.cycle(KINDS)
    return [_question(draw, number, next(kinds)) for number in range(count)]


def _question(draw: random.Random, number: int, kind: str) -> Question:
    # All kinds have all the beginnings: the number of kinds and of prompts share a divisor.
    teller = random.Random(number // len(KINDS) // 3)
    stories = [story(teller, teller.choice(NAMES))[0] for _ in range(MAX_STORIES)]
    prompt = " ".join(stories[: draw.randint(1, MAX_STORIES)])
    path, body = KINDS[kind](draw, prompt)
    is_bound = kind in BOUND
    sampling = {"temperature": 0} if draw.random() < 0.5 else {"temperature": 0.9, "seed": number}
    common = {
        "model": NAME,
        "max_tokens": BOUND_TOKENS if is_bound else draw.choice(OUTPUT_TOKENS),
        "ignore_eos": not is_bound,
        "return_token_ids": True,
    }
    return Question(kind, path, {**body, **common, **sampling})


def said_by(choice: Mapping[str, Any]) -> Said:
    """Tokens, text and end of one choice of a whole reply, or of an event of a stream."""
    message = choice.get("message") or choice.get("delta") or {}
    text = choice.get("text") or message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        text += (function.get("name") or "") + (function.get("arguments") or "")
    return Said(tuple(choice.get("token_ids") or ()), text, choice.get("finish_reason") or "")


async def with_answers(url: str, asked: Sequence[Question]) -> list[Question]:
    """The same questions with the answers of the node at `url`, asked one after the other."""
    timeout = aiohttp.ClientTimeout(total=REFERENCE_TIMEOUT_S)
    async with aiohttp.ClientSession(url, timeout=timeout) as http:
        return [await _answered(http, question) for question in asked]


async def _answered(http: aiohttp.ClientSession, question: Question) -> Question:
    async with http.post(question.path, json=question.body) as reply:
        body = await reply.json()
    if reply.status != 200:
        raise RuntimeError(f"{question.kind}: {json.dumps(body)[:500]}")
    return msgspec.structs.replace(question, expected=said_by(body["choices"][0]))
