"""One request's part of the current step, and its form for the worker: ids and numbers."""

import msgspec

from engine.kv_cache.mamba_states import Checkpoint
from engine.request import Request
from engine.step import (
    NO_COUNTS,
    NO_TOKENS,
    PromptTargets,
    SamplingInput,
    ScheduledRequest,
    StateSave,
)


class Planned(msgspec.Struct):
    """The next `num_tokens` of `request`; they count as computed once the worker returns.

    `positions`: after which its states are worth keeping; `checkpoints`: those that found room.
    """

    request: Request
    num_tokens: int
    positions: tuple[int, ...]
    checkpoints: tuple[Checkpoint, ...] = ()

    def worker_input(self) -> ScheduledRequest:
        """The worker's view; it samples only if the step computes the last known token."""
        request, tokens = self.request, self.request.token_ids
        assert request.blocks is not None
        start, end = request.num_computed_tokens, request.num_computed_tokens + self.num_tokens
        return ScheduledRequest(
            request.request_id,
            tokens[start:end],
            start,
            request.blocks.groups,
            _sampling_input(request) if end == len(tokens) else None,
            tuple([StateSave(kept.num_tokens, kept.states) for kept in self.checkpoints]),
            None if request.sampling.prompt_logprobs is None else _targets(request, start, end),
        )


def _targets(request: Request, start: int, end: int) -> PromptTargets | None:
    """The prompt's tokens after those of the chunk, as far as their log-probabilities miss."""
    #  tokens   start .. first .. end-1        first: the token before the first one that misses
    #  targets           first+1 .. end        the last token of the prompt has no target
    first = max(start, request.max_hit)
    targets = request.token_ids[first + 1 : min(end + 1, request.num_prompt_tokens)]
    if not targets:
        return None
    num_top = request.sampling.prompt_logprobs or 0
    return PromptTargets(first - start, targets, num_top)


def _sampling_input(request: Request) -> SamplingInput:
    """With no more than the parameters ask for: most requests need none of the sets."""
    params, tokens = request.sampling, request.token_ids
    counted = params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    return SamplingInput(
        params,
        len(tokens),
        request.forbidden_tokens() if params.min_tokens or params.bad_words else NO_TOKENS,
        request.seen_tokens() if params.repetition_penalty != 1.0 else NO_TOKENS,
        request.token_counts if counted else NO_COUNTS,
        request.allowed_tokens(),
    )
