"""Conversations with the demo model, several at once: each goes on from the answers that it got."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import aiohttp

from benchmarks.demo_model.text import NAMES, conversation, scene, story
from deploy.config import load_cluster
from tests.support.nodes.asking import CHAT, Answer, ask

DEMO_MODEL = Path(load_cluster().model)
NUM_PEOPLE = 8
MAX_TOKENS = 24
PAUSE_S = 0.2
RETRY_S = 30.0


@dataclass(slots=True)
class Chat:
    """One conversation about some 1,500 tokens of facts; `answers` holds each answer's tokens."""

    system: str
    questions: Sequence[str]
    messages: list[dict[str, str]] = field(default_factory=list)
    answers: list[list[int]] = field(default_factory=list)

    @classmethod
    def number(cls, seed: int, num_questions: int) -> "Chat":
        """A conversation that begins as no other one does."""
        rng = Random(f"live-{seed}")
        facts = [*scene(rng, NUM_PEOPLE).statements, *(story(rng, name)[0] for name in NAMES)]
        exchanges = conversation(rng, NUM_PEOPLE, num_questions)[1][:num_questions]
        system = f"You are assistant {seed}. These are the facts. {' '.join(facts)}"
        return cls(system, [exchange.question for exchange in exchanges])

    async def run(self, url: str, salt: str, room: asyncio.Semaphore) -> None:
        """All questions in order; a 5xx or a proxy that is away is asked again for a while."""
        for question in self.questions:
            async with room, asyncio.timeout(RETRY_S):
                answer = await self._ask_until_answered(url, question, salt)
            self.answers.append(answer.token_ids)
            said = answer.body["choices"][0]["message"]["content"]
            self.messages += [_said("user", question), _said("assistant", said)]

    async def ask(self, url: str, question: str, salt: str) -> Answer:
        """One more question, after which nothing is remembered."""
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [_said("system", self.system), *self.messages, _said("user", question)],
            "max_tokens": MAX_TOKENS,
            "temperature": 0,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        return await ask(url, body, path=CHAT)

    async def _ask_until_answered(self, url: str, question: str, salt: str) -> Answer:
        while True:
            with suppress(aiohttp.ClientError):
                answer = await self.ask(url, question, salt)
                if answer.status < 500:
                    return answer
            await asyncio.sleep(PAUSE_S)


async def run_chats(
    url: str, salt: str, num_chats: int, num_questions: int, *, at_once: int = 3
) -> list[Chat]:
    """All conversations side by side, of which `at_once` wait for an answer at a time."""
    room = asyncio.Semaphore(at_once)
    chats = [Chat.number(seed, num_questions) for seed in range(num_chats)]
    await asyncio.gather(*(chat.run(url, salt, room) for chat in chats))
    return chats


def _said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
