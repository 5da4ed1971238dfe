"""Reply bodies of the OpenAI surface with vLLM's additions. Knows nothing of how they are filled.

A field that is UNSET is left out; one that is None is sent as null.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from engine.types import (
    KVTransferParams,
    KVTransferStats,
    PromptLogprobs,
    RoutingDetails,
    TokenId,
    TokenLogprob,
)
from serving.api.choice_text import Delta, Detokenizer
from serving.api.plan import Plan
from serving.api.tokenizer import Tokenizer

TokenIds = tuple[TokenId, ...]

# JSON has no -inf; this is the floor that vLLM's clients know.
MIN_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """A log-probability that JSON can hold."""
    return MIN_LOGPROB if math.isnan(logprob) else max(logprob, MIN_LOGPROB)


class PromptTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of prompt tokens that came out of a cache."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Number of tokens that the model spent on thoughts."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts; `kv_transfer` tells what a remote prefill cost, `routing` who served."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET
    kv_transfer: KVTransferStats | UnsetType = UNSET
    routing: RoutingDetails | UnsetType = UNSET


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities in the shape of /v1/completions: four lists of equal length.

    The first token of an echoed prompt has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprobReply(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a prompt or an alternative to it; `rank` 1 is the most likely one."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobsReply = list[dict[int, PromptLogprobReply] | None]
"""An entry per token of the prompt; the first has none."""


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One text of /v1/completions, whole or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_token_ids: TokenIds | UnsetType = UNSET
    token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsReply | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One alternative to a token, with its exact bytes."""

    token: str
    logprob: float
    bytes: list[int]


class ContentLogprob(TopLogprob, frozen=True, kw_only=True):
    """One token of a chat reply and its alternatives."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Log-probabilities in the shape of /v1/chat/completions: one object per token."""

    content: list[ContentLogprob]


class FunctionCall(msgspec.Struct, frozen=True, kw_only=True):
    """The function that the model calls; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class ToolCallReply(msgspec.Struct, frozen=True, kw_only=True):
    """One call of a tool; the client's answer names its `id`. Only chunks have an `index`."""

    id: str
    function: FunctionCall
    type: str = "function"
    index: int | UnsetType = UNSET


class _Thoughts(msgspec.Struct, frozen=True, kw_only=True):
    """Thoughts, under the name that clients know and under the one that vLLM gives them now."""

    reasoning: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChatMessage(_Thoughts, frozen=True, kw_only=True):
    """The assistant's whole message; content is null where it only thinks or calls tools."""

    content: str | None
    role: str = "assistant"
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


class _ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that a whole message and a piece of one share."""

    index: int
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: TokenIds | UnsetType = UNSET


class ChatChoice(_ChatChoice, frozen=True, kw_only=True):
    """One whole message of /v1/chat/completions."""

    message: ChatMessage


class ChatDelta(_Thoughts, frozen=True, kw_only=True):
    """A piece of the assistant's message."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    tool_calls: list[ToolCallReply] | UnsetType = UNSET


class ChatChunkChoice(_ChatChoice, frozen=True, kw_only=True):
    """One piece of one message of /v1/chat/completions."""

    delta: ChatDelta


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """Fields that whole replies and stream chunks share."""

    id: str
    object: str
    created: int
    model: str
    usage: Usage | UnsetType | None = UNSET
    kv_transfer_params: KVTransferParams | UnsetType = UNSET


class CompletionReply(Envelope, frozen=True, kw_only=True):
    """A whole reply or one chunk of /v1/completions: OpenAI uses one shape for both."""

    choices: list[CompletionChoice]


class ChatReply(Envelope, frozen=True, kw_only=True):
    """A whole reply of /v1/chat/completions."""

    choices: list[ChatChoice]
    prompt_token_ids: TokenIds | UnsetType = UNSET
    prompt_logprobs: PromptLogprobsReply | UnsetType = UNSET


class ChatChunk(Envelope, frozen=True, kw_only=True):
    """One chunk of /v1/chat/completions."""

    choices: list[ChatChunkChoice]
    prompt_token_ids: TokenIds | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """One served model; `max_model_len` is vLLM's addition."""

    id: str
    created: int
    root: str
    max_model_len: int
    owned_by: str = "tandem"
    object: str = "model"
    parent: str | None = None


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    """GET /v1/models."""

    data: list[ModelCard]
    object: str = "list"


class TokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """POST /tokenize, in vLLM's shape."""

    count: int
    max_model_len: int
    tokens: TokenIds
    token_strs: list[str] | None = None


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """POST /v1/messages/count_tokens, in Anthropic's shape."""

    input_tokens: int


class DetokenizeReply(msgspec.Struct, frozen=True, kw_only=True):
    """POST /detokenize, in vLLM's shape."""

    prompt: str


class ReadyReply(msgspec.Struct, frozen=True, kw_only=True):
    """GET /ready: "ready", or "degraded" with the reasons.

    `nodes`: of a proxy, by label, "away", "warming", "serving" or "leaving".
    """

    status: str
    reasons: tuple[str, ...]
    nodes: Mapping[str, str] | UnsetType = UNSET


class LoadReply(msgspec.Struct, frozen=True, kw_only=True):
    """GET /load, in vLLM's shape."""

    server_load: int


class VersionReply(msgspec.Struct, frozen=True, kw_only=True):
    """GET /version."""

    version: str


class LogprobFormat:
    """Names tokens by their text, or by their ids where the request asks for that."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def completion(self, plan: Plan, delta: Delta) -> CompletionLogprobs | None:
        """Four lists; an echoed prompt comes first, whose first token has no log-probability.

        Offsets count characters from the start of the choice's text.
        """
        num_top, known = plan.requests[delta.index].sampling.logprobs, list(delta.logprobs)
        echoed = None if num_top is None or not plan.echo else delta.prompt_logprobs
        if not known and echoed is None:
            return None
        first: list[None] = []
        ids, offsets = [entry.token_id for entry in known], list(delta.text_offsets)
        # No log-probability is known of the first token of a prompt: its entry is null.
        if echoed is not None:
            most = num_top or 0
            rows = [TokenLogprob(it.token_id, it.logprob, it.top[:most]) for it, _ in echoed.rows()]
            known = [*rows, *known]
            prompt = plan.prompt_of(delta.index)
            first, ids = [None], [*prompt, *ids]
            offsets = [*self._offsets(prompt, plan.echo_of(delta.index)), *offsets]
        return CompletionLogprobs(
            tokens=[self._name(plan, token_id) for token_id in ids],
            token_logprobs=[*first, *(finite(entry.logprob) for entry in known)],
            top_logprobs=[*first, *(self._alternatives(plan, entry) for entry in known)],
            text_offset=offsets,
        )

    def chat(self, plan: Plan, delta: Delta) -> ChatLogprobs | None:
        """One object per token, with the exact bytes of each."""
        if not delta.logprobs:
            return None
        return ChatLogprobs(
            content=[
                ContentLogprob(
                    **self._token(plan, entry.token_id, entry.logprob),
                    top_logprobs=[TopLogprob(**self._token(plan, *pair)) for pair in entry.top],
                )
                for entry in delta.logprobs
            ]
        )

    def prompt(
        self, plan: Plan, found: PromptLogprobs | None
    ) -> list[dict[int, PromptLogprobReply] | None]:
        """An entry per token of the prompt: itself and its alternatives by id, in vLLM's shape."""
        num_top = plan.num_prompt_logprobs or 0
        rows = () if found is None else found.rows()
        return [None, *(self._of_prompt_token(row, rank, num_top) for row, rank in rows)]

    def _offsets(self, prompt: Sequence[TokenId], echo: str) -> Iterator[int]:
        """Where in `echo` the text of each token begins; parts of one character share a place."""
        detokenizer = Detokenizer(partial(self._tokenizer.decode, skip_special_tokens=False))
        offset = 0
        for token_id in prompt:
            yield offset
            piece = detokenizer.push(token_id)
            # A special token may have been put in front, and is in no text that was sent.
            if echo.startswith(piece, offset) or self._tokenizer.decode([token_id]):
                offset = min(offset + len(piece), len(echo))

    def _of_prompt_token(
        self, row: TokenLogprob, rank: int, num_top: int
    ) -> dict[int, PromptLogprobReply]:
        ranked = ((token_id, value, place) for place, (token_id, value) in enumerate(row.top, 1))
        entries = chain([(row.token_id, row.logprob, rank)], islice(ranked, num_top))
        found: dict[int, PromptLogprobReply] = {}
        for token_id, value, place in entries:
            text = self._tokenizer.token_text(token_id)
            reply = PromptLogprobReply(logprob=finite(value), rank=place, decoded_token=text)
            found.setdefault(token_id, reply)
        return found

    def _alternatives(self, plan: Plan, entry: TokenLogprob) -> dict[str, float]:
        """The alternatives by name, best first; the token itself is always among them."""
        found: dict[str, float] = {}
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            found.setdefault(self._name(plan, token_id), finite(logprob))
        return found

    def _token(self, plan: Plan, token_id: TokenId, logprob: float) -> dict[str, Any]:
        return {
            "token": self._name(plan, token_id),
            "logprob": finite(logprob),
            "bytes": list(self._tokenizer.token_bytes(token_id)),
        }

    def _name(self, plan: Plan, token_id: TokenId) -> str:
        return (
            f"token_id:{token_id}" if plan.tokens_as_ids else self._tokenizer.token_text(token_id)
        )
