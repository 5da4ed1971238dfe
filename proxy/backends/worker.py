"""The seam between the proxy and the engines it drives: one worker's calls, whatever its engine.

    pd_flow ─▶ Worker ─┬─ tandem.py   nodes of this project, by gRPC
                       ├─ vllm.py     `vllm serve` with NixlConnector, by HTTP
                       └─ sglang.py   SGLang's prefill and decode servers, by HTTP

P and D of one request have one backend: none reads what another hands over.
"""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Protocol

from msgspec import structs

from engine.errors import ConfigError, TandemError
from engine.types import FinishReason, GenerateOutput, GenerateRequest, SamplingParams
from serving.rpc.client import StreamDeadlines
from serving.rpc.messages import NodeInfo
from serving.rpc.node_http import HTTP_SCHEMES, NodeUrl, parse_node_url

UNKNOWN: Final = NodeInfo(engine_id="", kind="", model_names=(), max_model_len=0, vocab_size=0)
"""A worker that has not described itself yet."""


class Backend(StrEnum):
    """The engine of a worker."""

    TANDEM = "tandem"
    VLLM = "vllm"
    SGLANG = "sglang"


@dataclass(slots=True, frozen=True)
class WorkerUrl:
    """A worker's address as it was given, such as vllm+http://10.0.0.7:8100, and its parts."""

    text: str
    backend: Backend
    url: NodeUrl

    @property
    def is_foreign(self) -> bool:
        """True for a worker of another engine."""
        return self.backend is not Backend.TANDEM

    @classmethod
    def parse(cls, text: str, default: Backend = Backend.TANDEM) -> "WorkerUrl":
        """Without a backend before a plus it is one of `default`. Raises ConfigError."""
        name, plus, rest = text.partition("+")
        if plus and name not in list(Backend):
            known = ", ".join(Backend)
            raise ConfigError(f"worker URL {text!r}: backend {name!r} is none of: {known}")
        backend = Backend(name) if plus else default
        url = parse_node_url(rest if plus else text)
        if backend is Backend.TANDEM:
            return cls(url.text, backend, url)
        if url.scheme not in HTTP_SCHEMES:
            raise ConfigError(
                f"worker URL {text!r}: {backend} is asked by HTTP: write {backend}+http://host:port"
            )
        return cls(f"{backend}+{url.text}", backend, url)


@dataclass(slots=True, frozen=True)
class HandOver:
    """A prefill that one D of the same backend may take: P's life and its name there.

    `params`: P's own words for D, unchanged. `prefill`: P's part where it goes on beside D's, done
    with an error if P fails.
    """

    engine_id: str
    request_id: str
    params: Any
    prefill: "asyncio.Future[None] | None" = None


@dataclass(slots=True, frozen=True)
class Prefill:
    """P's one output. Without `hand_over` it is the whole answer, and D has nothing to do."""

    output: GenerateOutput
    hand_over: HandOver | None


class PrefillFailedError(TandemError):
    """P's part failed while D waited for it: `cause` is P's, and D did nothing wrong."""

    def __init__(self, cause: TandemError) -> None:
        super().__init__(f"the prefill failed: {cause}")
        self.cause = cause


@dataclass(slots=True, frozen=True)
class Call:
    """The terms of one call: its deadlines, and the prompt as `encode_prompt` made it."""

    deadlines: StreamDeadlines
    prompt: bytes


class WorkerRequests(Protocol):
    """The requests of one worker. Every call raises leaves of the error tree.

    `needs_prefill`: as D it computes no prompt.
    """

    needs_prefill: bool

    def encode_prompt(self, request: GenerateRequest) -> bytes:
        """The prompt on the wire, without the output so far; alike for all workers of a backend."""
        ...

    def can_continue(self, sampling: SamplingParams) -> bool:
        """True if an answer that has begun elsewhere goes on here as if it had never moved."""
        ...

    async def prefill(self, request: GenerateRequest, call: Call) -> Prefill:
        """One token more than the request has, and the keys and states for D.

        A caller that leaves calls `release` with the request's id: P may have finished.
        """
        ...

    def generate(
        self, request: GenerateRequest, call: Call, hand_over: HandOver | None = None
    ) -> AsyncGenerator[GenerateOutput]:
        """Outputs, the last with a finish reason; `aclose` cancels the request on the worker.

        Raises `PrefillFailedError` where P's part fails first.
        """
        ...

    async def release(self, engine_id: str, request_id: str, timeout_s: float) -> None:
        """Gives up what this life of P computes, or holds, under an id that P knows."""
        ...

    def cut_off(self) -> None:
        """Ends every request of this proxy here; readers get `NodeLostError`."""
        ...


class WorkerFacts(Protocol):
    """A worker's words on itself, and what is done to it as a whole."""

    async def describe(self, timeout_s: float, *, is_lost: bool) -> NodeInfo:
        """The worker's words on itself. `is_lost`: it may have come back at another place."""
        ...

    async def num_pulled_tokens(self, timeout_s: float) -> int:
        """Tokens pulled from others so far, where outputs do not say whether there was a pull."""
        ...

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        """File name to content."""
        ...

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        """Empties its cache. Raises UnavailableError where it cannot now."""
        ...

    async def close(self) -> None:
        """Ends all that is under way, and leaves nothing open."""
        ...


class Worker(WorkerRequests, WorkerFacts, Protocol):
    """One worker, reached or not; `backend` is its engine."""

    backend: Backend


def prefill_sampling(request: GenerateRequest) -> SamplingParams:
    """P's part: the same sampling, until one more token is there."""
    num_tokens = len(request.output_token_ids) + 1
    min_tokens = min(request.sampling.min_tokens, num_tokens)
    return structs.replace(request.sampling, max_tokens=num_tokens, min_tokens=min_tokens)


def is_whole(output: GenerateOutput, request: GenerateRequest) -> bool:
    """True where P's output ends the answer to `request`, or says that P gave it up.

    P ends by length after its one token; only a stop, or a client that wanted no more, makes that
    the whole answer.
    """
    if output.finish_reason is FinishReason.LENGTH:
        return request.sampling.max_tokens == len(request.output_token_ids) + 1
    return output.finish_reason is not None
