"""Requests to nodes of this or another process, and how two answers differ."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec

from connector.registry import builder_of
from engine.types import (
    GenerateOutput,
    GenerateRequest,
    KVTransferParams,
    SamplingParams,
    TokenLogprob,
)
from serving.config import KVTransferConfig, NodeConfig
from serving.node.connector import BuilderOf
from serving.node.server import NodeServer

GREEDY = SamplingParams(max_tokens=32, temperature=0.0, logprobs=3, ignore_eos=True)
SAMPLED = SamplingParams(
    max_tokens=32, temperature=0.9, top_p=0.95, seed=11, logprobs=3, ignore_eos=True
)
LENGTHS = (1, 17, 65, 200, 700)
VOCABULARY = 510
NEAR_TIE = 1e-3


class Asked(Protocol):
    """Whatever answers: an engine, or a client of one."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]: ...


@dataclass(slots=True)
class Answer:
    """All that one request got."""

    tokens: list[int]
    logprobs: list[TokenLogprob]
    last: GenerateOutput


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """A prompt without short periods."""
    return tuple((7 * i * i + 3 * i + salt) % VOCABULARY + 2 for i in range(length))


def request_of(
    prompt: Sequence[int], sampling: SamplingParams, params: KVTransferParams | None = None
) -> GenerateRequest:
    """One request; its name does not matter."""
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=tuple(prompt),
        sampling=sampling,
        kv_transfer_params=params,
    )


async def ask(node: Asked, request: GenerateRequest) -> Answer:
    """One request to its end."""
    answer = Answer([], [], GenerateOutput())
    async for output in node.generate(request):
        answer.tokens += output.token_ids
        answer.logprobs += output.logprobs or ()
        answer.last = output
    return answer


async def hand_over(p: Asked, d: Asked, request: GenerateRequest) -> Answer:
    """P's part with one token, then D's with what P says."""
    one = msgspec.structs.replace(request.sampling, max_tokens=1)
    asked = KVTransferParams(do_remote_decode=True)
    held = await ask(p, request_of(request.prompt_token_ids, one, asked))
    params = held.last.kv_transfer_params
    return await ask(d, msgspec.structs.replace(request, kv_transfer_params=params))


@dataclass(slots=True)
class Difference:
    """Answers beside those that they should be; after a token that differs contexts do, too."""

    tokens: int = 0
    ties: int = 0
    wrong: int = 0
    largest: float = 0.0

    def add(self, found: Answer, truth: Answer) -> None:
        """One more pair."""
        if len(found.tokens) != len(truth.tokens):
            self.wrong += 1
        for mine, theirs in zip(found.logprobs, truth.logprobs, strict=False):
            self.tokens += 1
            if mine.token_id != theirs.token_id:
                is_tie = theirs.top[0][1] - theirs.top[1][1] <= NEAR_TIE
                self.ties += is_tie
                self.wrong += not is_tie
                return
            self.largest = max(self.largest, abs(mine.logprob - theirs.logprob))

    def __str__(self) -> str:
        others = f"{self.wrong} differ, {self.ties} near ties"
        return f"{self.tokens} tokens: {others}; log-probs to {self.largest:.1e}"


@asynccontextmanager
async def node(
    folder: Path,
    device: str,
    *,
    kind: str = "decode",
    transport: str | None = None,
    build: BuilderOf = builder_of,
    **changes: object,
) -> AsyncIterator[NodeServer]:
    """A node of this process until the block ends; `changes` are NodeConfig fields."""
    server = NodeServer(config_of(folder, device, transport=transport, **changes), kind, build)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def config_of(
    folder: Path, device: str, *, transport: str | None = None, **changes: object
) -> NodeConfig:
    """float32 and no prefix caching, unless `changes` say so."""
    # Without a choice: what moves any arena and needs no package.
    extra = {"transport": transport or "zmq", "kv_lease_duration": 120.0}
    config = NodeConfig(
        model=str(folder),
        device=device,
        port=0,
        dtype="float32",
        kv_cache_memory_bytes=64 << 20,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        kv_transfer_config=KVTransferConfig(kv_connector_extra_config=extra),
    )
    return msgspec.structs.replace(config, **changes)
