"""One request inside the engine: its tokens, its status, its blocks.

Torch-free. The table `TRANSITIONS` lists every legal change of status.
"""

import time
from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import chain

from engine.bad_words import BadWordMatcher
from engine.grammars.matcher import Matcher
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.tables import BlockTables
from engine.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    KVTransferParams,
    PromptLogprobs,
    SamplingParams,
    TokenId,
    TokenLogprob,
)

LABEL_LIMIT = 200


def unique_id(label: str, number: int) -> str:
    """The node's own name of the `number`-th request."""
    return f"{label[:LABEL_LIMIT]}-{number:x}"


def has_label(request_id: str, label: str) -> bool:
    """True if `unique_id` made `request_id` from `label`."""
    return request_id.rpartition("-")[0] == label[:LABEL_LIMIT]


class RequestStatus(Enum):
    """The states of a request's life; names are vLLM's.

    WAITING ----------------------------> RUNNING ---> FINISHED (from any status)
     ^    |                               ^  |  ^
     |    v         all loaded            |  |  |
    WAITING_FOR_REMOTE_KVS ---------------+  |  | room again
     (back to WAITING if the load failed)    v  |
                                         PREEMPTED
    """

    WAITING = auto()
    WAITING_FOR_REMOTE_KVS = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


TRANSITIONS = {
    RequestStatus.WAITING: {
        RequestStatus.RUNNING,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.FINISHED,
    },
    RequestStatus.WAITING_FOR_REMOTE_KVS: {
        RequestStatus.RUNNING,
        RequestStatus.WAITING,
        RequestStatus.FINISHED,
    },
    RequestStatus.RUNNING: {RequestStatus.PREEMPTED, RequestStatus.FINISHED},
    RequestStatus.PREEMPTED: {
        RequestStatus.RUNNING,
        RequestStatus.WAITING_FOR_REMOTE_KVS,
        RequestStatus.FINISHED,
    },
    RequestStatus.FINISHED: set(),
}


@dataclass(slots=True, eq=False)
class Request:
    """A request that the scheduler owns.

    `token_ids` is the prompt followed by the output. `num_computed_tokens` of them have K/V and
    state in this node's arena; the rest is what the next steps compute.

        token_ids  [ prompt .................... | output ....... ]
        computed   [ ..................>                           ]

    `prefix` gives the digests of its tokens. Since its last start the first `num_local_tokens` were
    here, and a load brings, or has brought, what is missing of the first `num_loading_tokens`; the
    rest of the prompt is computed. `is_counted`: the sources of its prompt are. Only the connector
    reads `kv_transfer_params`. `matcher` follows the output if a grammar binds it, `bad_words` if
    there are any.
    `prompt_logprobs`: those found so far, chunk by chunk, until the first token takes them along.

    It waited `queue_s` seconds from `submitted_at` (monotonic) until it first got blocks.

    Once it has ended, its blocks stay until `num_holds` holds on them have ended too.

    The first `num_known_tokens` were computed before, here or by another request. If some of them
    are computed again, `recompute_cause` says why. `num_lost_to_state`: tokens of the prompt whose
    attention was here at the first start, behind the last state that was.
    """

    request_id: str
    token_ids: list[TokenId]
    num_prompt_tokens: int
    sampling: SamplingParams
    eos_token_ids: frozenset[TokenId]
    max_total_tokens: int
    prefix: PrefixDigests
    kv_transfer_params: KVTransferParams | None = None
    priority: int = 0
    cache_boundaries: tuple[int, ...] = ()
    arrival: int = 0
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_local_tokens: int = 0
    num_loading_tokens: int = 0
    num_failed_loads: int = 0
    num_holds: int = 0
    num_cached_tokens: int = 0
    num_lost_to_state: int = 0
    num_known_tokens: int = 0
    recompute_cause: str = ""
    is_counted: bool = False
    blocks: BlockTables | None = None
    finish_reason: FinishReason | None = None
    stop_token: TokenId | None = None
    last_logprob: TokenLogprob | None = None
    token_counts: dict[TokenId, int] = field(default_factory=dict)
    matcher: Matcher | None = None
    bad_words: BadWordMatcher | None = None
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    submitted_at: float = field(default_factory=time.monotonic)
    queue_s: float | None = None
    _seen: set[TokenId] = field(default_factory=set)
    _num_seen: int = 0
    _allowed: bytes = b""

    @classmethod
    def from_generate(
        cls,
        origin: GenerateRequest,
        hasher: PrefixHasher,
        *,
        max_model_len: int,
        eos_token_ids: frozenset[TokenId],
        matcher: Matcher | None = None,
    ) -> "Request":
        """The engine's view of `origin`; the output ends at the context limit at the latest.

        `matcher` has followed the output so far.
        """
        num_prompt, sampling = len(origin.prompt_token_ids), origin.sampling
        token_ids, output = list(origin.token_ids), origin.output_token_ids
        return cls(
            request_id=origin.request_id,
            token_ids=token_ids,
            num_prompt_tokens=num_prompt,
            sampling=sampling,
            # Once a grammar has ended there is nothing but the end of text to choose.
            eos_token_ids=frozenset() if sampling.ignore_eos and not matcher else eos_token_ids,
            max_total_tokens=min(num_prompt + sampling.max_tokens, max_model_len),
            prefix=PrefixDigests(hasher, token_ids, origin.cache_salt),
            kv_transfer_params=origin.kv_transfer_params,
            priority=origin.priority,
            cache_boundaries=origin.cache_boundaries,
            token_counts=Counter(output),
            matcher=matcher,
            bad_words=BadWordMatcher(sampling.bad_words, num_prompt)
            if sampling.bad_words
            else None,
        )

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, those of a remote prefill included."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_missing_prompt_tokens(self) -> int:
        """Prompt tokens that are neither computed nor being loaded."""
        is_loading = self.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        num_here = self.num_loading_tokens if is_loading else self.num_computed_tokens
        return max(0, self.num_prompt_tokens - num_here)

    @property
    def max_hit(self) -> int:
        """Tokens that a cached prefix may stand for: the last one is computed for its logits.

        Before the first token of a request with prompt log-probabilities, so are all tokens whose
        successors have none yet.
        """
        if self.sampling.prompt_logprobs is None or self.num_output_tokens:
            return self.num_tokens - 1
        # Row i tells token i + 1, so with k rows the first k tokens need not be computed again.
        return sum(len(part.ranks) for part in self.prompt_logprobs)

    @property
    def waits_for_mask(self) -> bool:
        """True while it is not known which tokens its grammar allows next."""
        return self.matcher is not None and self.matcher.is_waiting

    @property
    def is_finished(self) -> bool:
        """True once the request has ended."""
        return self.status is RequestStatus.FINISHED

    def move(self, status: RequestStatus) -> None:
        """Enters `status`. Raises ValueError for a transition that `TRANSITIONS` does not list."""
        if status not in TRANSITIONS[self.status]:
            raise ValueError(f"request {self.request_id}: {self.status.name} -> {status.name}")
        if self.queue_s is None and status is not RequestStatus.FINISHED:
            self.queue_s = time.monotonic() - self.submitted_at
        self.status = status

    def lose(self, num_tokens: int, cause: str) -> None:
        """Notes that some of the first `num_tokens`, all computed once, must be computed again."""
        if num_tokens > self.num_known_tokens:
            self.num_known_tokens = num_tokens
        self.recompute_cause = cause

    def append(self, token_id: TokenId, logprob: TokenLogprob | None) -> GenerateOutput:
        """Adds one output token and decides whether it ends the request; returns its output."""
        self.token_ids.append(token_id)
        self.last_logprob = logprob
        self.token_counts[token_id] = self.token_counts.get(token_id, 0) + 1
        self.finish_reason = self._finish_reason(token_id)
        if self.matcher is not None and self.finish_reason is None:
            self.matcher.accept(token_id)
        return GenerateOutput(
            token_ids=(token_id,),
            logprobs=(logprob,) if logprob else None,
            prompt_logprobs=self._take_prompt_logprobs() if self.num_output_tokens == 1 else None,
            num_cached_tokens=self.num_cached_tokens,
            num_tokens_lost_to_state=self.num_lost_to_state,
        )

    def forbidden_tokens(self, position: int) -> frozenset[TokenId]:
        """Tokens that would end the output before `min_tokens`, or complete a bad word.

        Of the choice after `position` tokens of prompt and output.
        """
        bad = frozenset() if self.bad_words is None else self.bad_words.forbidden(self.token_ids)
        if position - self.num_prompt_tokens >= self.sampling.min_tokens:
            return bad
        return bad | self.eos_token_ids | frozenset(self.sampling.stop_token_ids)

    def seen_tokens(self) -> Set[TokenId]:
        """All tokens of prompt and output; the set grows with the request and is not to be kept."""
        self._seen.update(self.token_ids[self._num_seen :])
        self._num_seen = len(self.token_ids)
        return self._seen

    def allowed_tokens(self) -> bytes:
        """A bit per token that may come next, least significant first; empty: all may."""
        wanted = self.sampling.allowed_token_ids
        if wanted and not self._allowed:
            bits = bytearray(max(wanted) // 8 + 1)
            for token in wanted:
                bits[token >> 3] |= 1 << (token & 7)
            self._allowed = bytes(bits)
        if self.matcher is None:
            return self._allowed
        allowed = self.matcher.mask
        assert allowed is not None, "a request whose mask is missing is in no step"
        if not self._allowed:
            return allowed
        both = int.from_bytes(allowed, "little") & int.from_bytes(self._allowed, "little")
        return both.to_bytes(len(allowed), "little")

    def _take_prompt_logprobs(self) -> PromptLogprobs | None:
        """The whole prompt's log-probabilities, which then belong to the caller."""
        parts, self.prompt_logprobs = self.prompt_logprobs, []
        if self.sampling.prompt_logprobs is None:
            return None
        return PromptLogprobs(
            parts[0].num_top if parts else 0,
            token_ids=tuple(chain.from_iterable(part.token_ids for part in parts)),
            logprobs=tuple(chain.from_iterable(part.logprobs for part in parts)),
            ranks=tuple(chain.from_iterable(part.ranks for part in parts)),
        )

    def _finish_reason(self, token_id: TokenId) -> FinishReason | None:
        is_long = self.num_output_tokens >= self.sampling.min_tokens
        # A grammar that allows nothing but the end ends the output before `min_tokens`.
        if token_id in self.eos_token_ids and (is_long or self.matcher is not None):
            return FinishReason.STOP
        if is_long and token_id in self.sampling.stop_token_ids:
            self.stop_token = token_id
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_total_tokens else None
