"""Requests and their outputs: plain frozen structs shared by API, engine, RPC and proxy.

Knows nothing of tensors, sockets or HTTP. Everything here may cross a process.
"""

import re
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, UnsetType
from msgspec.structs import force_setattr

MAX_TOKENS_IN_REQUEST = 4_194_304
MAX_LOGPROBS = 20
MAX_PROMPT_LOGPROBS = 262_144  # of one prompt: its tokens times the values of each
MAX_BAD_WORDS = 1024
MAX_BAD_WORD_TOKENS = 16_384  # of all of them together
MAX_STOP_STRINGS = 16
MAX_TOKEN_ID = 2**32 - 1
MAX_GRAMMAR_CHARS = 262_144
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKENS = 65_536
MAX_CACHE_BOUNDARIES = 16
MAX_KV_TRANSFER_PARAMS_BYTES = 8 * 2**20

# Everything from another process is bounded by its type, so decoding checks it.
TokenId = int
SchedulingPolicy = Literal["fcfs", "priority"]
Port = Annotated[int, Meta(ge=1, le=65535)]
TokenIdOnWire = Annotated[int, Meta(ge=0, le=MAX_TOKEN_ID)]
NumTokens = Annotated[int, Meta(ge=1, le=MAX_TOKENS_IN_REQUEST)]
BlockId = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Label = Annotated[str, Meta(min_length=1, max_length=256)]

# https://www.w3.org/TR/trace-context/#traceparent-header
_TRACEPARENT = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

MIN_TEMPERATURE = 0.01
"""vLLM raises smaller positive values to it; logits divided by less may overflow."""
MIN_REPETITION_PENALTY = 1e-6
"""So that the largest float32 logit, divided by it and by the temperature, is a finite float64."""


class FinishReason(StrEnum):
    """Why a request ended; the values are OpenAI's and vLLM's."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class BadWord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Tokens whose last one may not follow the others."""

    token_ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=1024)]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules for choosing tokens; names and meanings are vLLM's.

    `seed` feeds a counter-based generator (seed, position), so a token depends on nothing else: not
    on the batch, not on the node. `logprobs` asks for that many alternatives besides the chosen
    token; `prompt_logprobs` for that many besides each token of the prompt, whose cached prefix is
    then not read. `grammar` (see `engine.grammars`) and `allowed_token_ids` bind the output unless
    they are empty. No entry of `bad_words` is completed where another token may come. `logit_bias`
    is added to the logits of its tokens. Temperatures and repetition penalties that are too small
    to compute with are raised.
    """

    max_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_IN_REQUEST)] = 16
    min_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_IN_REQUEST)] = 0
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    min_p: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2.0, le=2.0)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] = 0
    stop_token_ids: tuple[TokenId, ...] = ()
    ignore_eos: bool = False
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    grammar: Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)] = ""
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Meta(ge=-100.0, le=100.0)]],
        Meta(max_length=MAX_LOGIT_BIASES),
    ] = {}
    allowed_token_ids: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_ALLOWED_TOKENS)] = ()
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    bad_words: Annotated[tuple[BadWord, ...], Meta(max_length=MAX_BAD_WORDS)] = ()

    def __post_init__(self) -> None:
        """Raises small values here, so that all nodes and proxies compute with the same ones."""
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            force_setattr(self, "temperature", MIN_TEMPERATURE)
        if 0.0 < self.repetition_penalty < MIN_REPETITION_PENALTY:
            force_setattr(self, "repetition_penalty", MIN_REPETITION_PENALTY)


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Log-probability of one chosen token and of the most likely alternatives, best first."""

    token_id: TokenIdOnWire
    logprob: float
    top: Annotated[tuple[tuple[TokenIdOnWire, float], ...], Meta(max_length=MAX_LOGPROBS + 1)] = ()


class PromptLogprobs(msgspec.Struct, frozen=True):
    """Log-probabilities of a prompt's tokens, of which the first has none, as columns.

    A row per token after the first, in order; `token_ids` and `logprobs` have `num_top` + 1 values
    per row: the token itself, then the most likely ones, best first. `ranks`: one per row, 1 for
    the most likely token. Columns, since prompts are long and an object per value takes time.

        token_ids  | token 1, its num_top alternatives | token 2, its num_top alternatives | ...
        ranks      | of token 1                        | of token 2                        | ...
    """

    num_top: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)]
    token_ids: Annotated[tuple[TokenIdOnWire, ...], Meta(max_length=MAX_PROMPT_LOGPROBS)]
    logprobs: Annotated[tuple[float, ...], Meta(max_length=MAX_PROMPT_LOGPROBS)]
    ranks: Annotated[tuple[int, ...], Meta(max_length=MAX_PROMPT_LOGPROBS)]

    def rows(self) -> Iterator[tuple[TokenLogprob, int]]:
        """Each token with its alternatives, and its rank."""
        width = self.num_top + 1
        for row, rank in enumerate(self.ranks):
            tokens = self.token_ids[row * width : (row + 1) * width]
            values = self.logprobs[row * width : (row + 1) * width]
            top = tuple(zip(tokens[1:], values[1:], strict=True))
            yield TokenLogprob(tokens[0], values[0], top), rank


class KVTransferParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """P's description of a finished prefill for D, in vLLM's words; hostile input until verified.

    A client or PD proxy sends `do_remote_decode` to P. P answers with `do_remote_prefill` and the
    other fields. D gets that answer unchanged. `signature` is P's keyed digest of every other
    field, so that D talks only to hosts that a node of its own cluster named.

    `remote_filled_from`: by KV cache group, the first token that the first of P's blocks holds; not
    there if all blocks hold all of their tokens.

    In vLLM's bidirectional mode D may answer with `do_remote_decode` and the place of the
    `remote_num_tokens` tokens that it has computed, from which P can start the next turn.
    """

    do_remote_decode: bool = False
    do_remote_prefill: bool = False
    remote_engine_id: Label | None = None
    remote_request_id: Label | None = None
    remote_block_ids: (
        Annotated[
            tuple[Annotated[tuple[BlockId, ...], Meta(max_length=262_144)], ...],
            Meta(max_length=64),
        ]
        | None
    ) = None
    remote_filled_from: (
        Annotated[
            tuple[Annotated[int, Meta(ge=0, le=MAX_TOKENS_IN_REQUEST)], ...], Meta(max_length=64)
        ]
        | None
    ) = None
    remote_host: Label | None = None
    remote_port: Port | None = None
    remote_num_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS_IN_REQUEST)] | None = None
    remote_prompt_digest: Annotated[str, Meta(max_length=128)] | None = None
    remote_generation: Annotated[int, Meta(ge=1, le=2**63 - 1)] | None = None
    tp_size: Annotated[int, Meta(ge=1, le=1)] | None = None
    first_token_ids: (
        Annotated[tuple[TokenIdOnWire, ...], Meta(min_length=1, max_length=1)] | None
    ) = None
    first_token_logprobs: (
        Annotated[tuple[TokenLogprob, ...], Meta(min_length=1, max_length=1)] | None
    ) = None
    remote_num_cached_tokens: Annotated[int, Meta(ge=0, le=MAX_TOKENS_IN_REQUEST)] | None = None
    signature: Annotated[str, Meta(max_length=128)] | None = None

    @property
    def is_return_pull(self) -> bool:
        """True if P may start from the tokens of the previous turn that D keeps."""
        return self.do_remote_decode and self.remote_engine_id is not None


class RequestOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Who sent a request, for logs, traces and metrics only.

    `label`: the caller's X-Request-Id; `key`: the name of its key. `traceparent`: W3C's, of the
    span that the caller has open. `num_choices`: those asked for with one prompt, which the first
    of them tells; 0 of the others.
    """

    label: str = ""
    key: str = ""
    traceparent: str = ""
    num_choices: int = 1

    def __post_init__(self) -> None:
        """An invalid `traceparent` is ignored."""
        if self.traceparent and not _TRACEPARENT.fullmatch(self.traceparent):
            force_setattr(self, "traceparent", "")


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One sequence to generate; `request_id` is unique in the process that made it.

    `output_token_ids`: the output so far, which another node generated; only what follows is sent.
    All of `sampling` counts from the end of the prompt. `session_id`: the caller's label for
    requests that share nodes; a proxy keeps it to itself. `cache_boundaries`: token counts of the
    prompt after which the caller expects others to part from it; hints, which change no token.
    `tenant`: an opaque label of those who take turns with others where requests wait.
    """

    request_id: Label
    prompt_token_ids: tuple[TokenId, ...]
    sampling: SamplingParams = SamplingParams()
    kv_transfer_params: KVTransferParams | None = None
    cache_salt: Annotated[str, Meta(max_length=256)] | None = None
    priority: int = 0
    session_id: Label | None = None
    tenant: Annotated[str, Meta(max_length=256)] = ""
    output_token_ids: tuple[TokenId, ...] = ()
    cache_boundaries: Annotated[tuple[NumTokens, ...], Meta(max_length=MAX_CACHE_BOUNDARIES)] = ()
    # Not sent to other nodes: nothing that is computed depends on it.
    origin: RequestOrigin = RequestOrigin()

    @property
    def token_ids(self) -> tuple[TokenId, ...]:
        """Prompt and output so far."""
        return self.prompt_token_ids + self.output_token_ids


class KVTransferStats(msgspec.Struct, frozen=True, kw_only=True):
    """The cost of one pull: bytes by kind, milliseconds, cached tokens on both sides.

    D pulls a remote prefill; P pulls a previous turn, of which it had `prefill_cached_tokens`.
    `verified`: the bytes that arrived are known to be those of the other side. `started_at`: when
    the pull began, in seconds since 1970 by the clock of the node that pulled. `cause`: why nothing
    was pulled, in the words of `tandem:kv_hand_over_failures`.
    """

    attention_bytes: int = 0
    state_bytes: int = 0
    transfer_ms: float = 0.0
    prefill_cached_tokens: int = 0
    decode_cached_tokens: int = 0
    verified: bool = False
    started_at: float = 0.0
    cause: str = ""


class RoutingDetails(msgspec.Struct, frozen=True, kw_only=True):
    """A proxy's choice for one request: nodes by URL, why, and the cached tokens it counted on.

    `prefix_tokens_lost_to_state`: prompt tokens that were computed although their attention was
    cached, since no Mamba state was. Clients that may not know what was cached hear no numbers.
    """

    prefill: str | None
    decode: str
    reason: str
    prefill_hit_tokens: int | UnsetType = 0
    decode_hit_tokens: int | UnsetType = 0
    prefix_tokens_lost_to_state: int | UnsetType = 0


class HandOverProblem(msgspec.Struct, frozen=True, kw_only=True):
    """Hand-overs from incarnation `engine_id` that keep failing, `count` times in a row.

    `address` is for people. `since_s`: seconds since the first failure. `retry_in_s`: seconds
    until the next try is welcome; 0: now.
    """

    engine_id: str
    address: str
    cause: str
    detail: str
    count: int
    since_s: float
    retry_in_s: float

    def reason(self, to: str) -> str:
        """One line for /ready, which anybody may read: without address and detail."""
        return (
            f"hand-overs from {self.engine_id} to {to} fail ({self.count} in a row for "
            f"{self.since_s:.0f} s): {self.cause}; the log of {to} says more"
        )


class GenerateOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One request's tokens of one step; the last output says why the request ended.

    The output with the first token brings `prompt_logprobs` where they are asked for.
    `kv_transfer_params` come with the last output of a remote decode on P, or of a request that D
    keeps for the next turn. `kv_transfer` comes with the last output where this node pulled or had
    to do without, and `routing` with that of a proxy that tells its choices. `queue_s`: seconds
    without blocks, with the last output. `num_tokens_lost_to_state`: see `RoutingDetails`.
    """

    token_ids: tuple[TokenId, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    prompt_logprobs: PromptLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: TokenId | None = None
    num_cached_tokens: int = 0
    num_tokens_lost_to_state: int = 0
    kv_transfer_params: KVTransferParams | None = None
    kv_transfer: KVTransferStats | None = None
    routing: RoutingDetails | None = None
    # Not sent to other nodes, each of which has a queue of its own.
    queue_s: float | None = None

    @property
    def was_pulled(self) -> bool:
        """True where this node pulled a part of what it needed."""
        return self.kv_transfer is not None and not self.kv_transfer.cause
