"""Logits to tokens: greedy, or drawn by a generator that is a pure function of (seed, position).

So a token depends on the logits alone: not on the batch, the step or the node that samples it.
Log-probabilities are those of the raw logits (vLLM's default), before penalties and temperature.
A failure while sampling for one request ends that request only.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence, Set, ValuesView
from math import isfinite, isnan

import numpy as np
import structlog
import torch
from torch import Tensor

from engine.errors import EngineGenerateError, InvalidRequestError
from engine.step import (
    ModelRunnerOutput,
    PromptTargets,
    SampledToken,
    SamplingInput,
    ScheduledRequest,
)
from engine.types import PromptLogprobs, SamplingParams, TokenId, TokenLogprob
from engine.worker.packed_copies import CopyToHost, to_device

FAILED = "sampling a token failed; the log says why"
NONE_ALLOWED = (
    "no token is allowed here: the grammar, allowed_token_ids and bad_words exclude each other"
)

log = structlog.get_logger()


def sample(logits: Tensor, inputs: Mapping[str, SamplingInput]) -> ModelRunnerOutput:
    """One token per request id, or its error, from float32 `logits` [requests, vocab]."""
    output = ModelRunnerOutput()
    # One pass over all rows gives the greedy tokens, and finds rows with NaN (which spreads).
    highest, greedy = (values.tolist() for values in logits.max(dim=-1))
    for row, (name, item) in enumerate(inputs.items()):
        if not isfinite(highest[row]):
            output.failed[name] = broken_logits(name, highest[row])
            continue
        is_greedy, count = takes_the_highest(item), item.params.logprobs
        if is_greedy and count is None:
            output.sampled[name] = SampledToken(greedy[row], None)
            continue
        try:
            token = greedy[row] if is_greedy else _choose(logits[row], item)
            logprob = None if count is None else _token_logprob(logits[row], token, count)
            output.sampled[name] = SampledToken(token, logprob)
        except InvalidRequestError as error:
            output.failed[name] = error
        # Broad on purpose: one request's values must not end the others of its step.
        except Exception:
            log.exception("sampling failed", request_id=name)
            output.failed[name] = EngineGenerateError(FAILED)
    return output


def broken_logits(request_id: str, highest: float) -> EngineGenerateError:
    """The error of a request whose highest logit is not finite, which the log hears of too."""
    kind = "NaN" if isnan(highest) else "infinite"
    error = EngineGenerateError(f"the model produced {kind} logits")
    log.error("a request failed", request_id=request_id, cause=str(error))
    return error


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), a pure function of (seed, position)."""
    key = seed.to_bytes(8, "little", signed=True) + position.to_bytes(8, "little")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def takes_the_highest(item: SamplingInput) -> bool:
    """True if the highest raw logit wins."""
    params = item.params
    is_bound = item.allowed or params.logit_bias or item.forbidden
    return not (params.temperature > 0.0 or is_bound or item.seen or item.counts)


def _choose(row: Tensor, item: SamplingInput) -> int:
    scores = row.to(torch.float64, copy=True)
    params = item.params
    if bias := params.logit_bias:
        # All at once: one by one a thousand entries would take longer than the step.
        scores[_ids(bias.keys(), scores)] += _floats(bias.values(), scores)
    _penalise(scores, item)
    if item.forbidden or item.allowed:
        scores[_blocked(item, scores.numel()).to(scores.device)] = -torch.inf
    if params.temperature == 0.0:
        return int(scores.argmax())
    return _draw(scores / params.temperature, params, uniform(params.seed, item.position))


def _blocked(item: SamplingInput, vocab_size: int) -> Tensor:
    """bool [vocab]: True for tokens that may not be chosen; InvalidRequestError if all are."""
    # By NumPy: torch takes the ids of a list one by one, which for a thousand of them takes longer
    # than the rest of sampling.
    allowed = np.ones(vocab_size, np.bool_)
    if item.allowed:
        bits = np.unpackbits(np.frombuffer(item.allowed, np.uint8), bitorder="little")[:vocab_size]
        allowed[: len(bits)], allowed[len(bits) :] = bits, False
    without_ends = allowed.copy()
    forbidden = np.fromiter(item.forbidden, np.int64, len(item.forbidden))
    without_ends[forbidden[forbidden < vocab_size]] = False
    # Where a grammar allows nothing but the end, it ends before `min_tokens`.
    allowed = without_ends if without_ends.any() else allowed
    if not allowed.any():
        raise InvalidRequestError(NONE_ALLOWED)
    return torch.from_numpy(~allowed)


def _ids(token_ids: Set[TokenId], like: Tensor) -> Tensor:
    return torch.from_numpy(np.fromiter(token_ids, np.int64, len(token_ids))).to(like.device)


def _floats(values: ValuesView[float], like: Tensor) -> Tensor:
    return torch.from_numpy(np.fromiter(values, np.float64, len(values))).to(like.device)


def _penalise(scores: Tensor, item: SamplingInput) -> None:
    """Applies OpenAI's two penalties to the output, the repetition penalty to all tokens."""
    params = item.params
    if item.seen:
        seen, penalty = _ids(item.seen, scores), params.repetition_penalty
        values = scores[seen]
        scores[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if item.counts:
        tokens, counts = _ids(item.counts.keys(), scores), _floats(item.counts.values(), scores)
        scores[tokens] -= params.frequency_penalty * counts + params.presence_penalty


def _draw(scores: Tensor, params: SamplingParams, number: float) -> int:
    """Inverse transform over the tokens sorted by score, after top-k, top-p and min-p."""
    ordered, tokens = scores.sort(descending=True, stable=True)
    if params.top_k > 0:
        ordered = ordered[: params.top_k]
    probabilities = ordered.softmax(dim=-1)
    keep = probabilities >= params.min_p * probabilities[0]
    if params.top_p < 1.0:
        # A token stays if the mass before it is below top_p, so the first one always stays.
        keep &= probabilities.cumsum(dim=-1) - probabilities < params.top_p
    kept = probabilities * keep
    cumulative = kept.cumsum(dim=-1)
    place = int(torch.searchsorted(cumulative, number * cumulative[-1], right=True))
    # Rounding may put the place one past the last token that was kept.
    last = int(keep.nonzero()[-1])
    return int(tokens[min(place, last)])


def _token_logprob(row: Tensor, token: int, count: int) -> TokenLogprob:
    logprobs = row.log_softmax(dim=-1)
    values, tokens = logprobs.topk(min(count, logprobs.numel()))
    top = tuple(zip(tokens.tolist(), values.tolist(), strict=True))
    return TokenLogprob(token, float(logprobs[token]), top)


MAX_SLICE_BYTES = 32 * 2**20
"""Of the float32 logits of one slice; a few tensors of this size live at once."""


def prompt_logprobs(
    hidden: Tensor, ordered: Sequence[ScheduledRequest], logits: Callable[[Tensor], Tensor]
) -> dict[str, PromptLogprobs]:
    """By request id, of what `ordered` asks for; `hidden` [tokens, hidden] is packed in its order.

    `logits`: float32 [rows, vocab] of rows of hidden states.
    """
    found, start = {}, 0
    for item in ordered:
        if (targets := item.targets) is not None:
            first = start + targets.first_row
            rows = hidden[first : first + len(targets.token_ids)]
            found[item.request_id] = _of_rows(rows, targets, logits)
        start += len(item.token_ids)
    return found


def _of_rows(
    hidden: Tensor, targets: PromptTargets, logits: Callable[[Tensor], Tensor]
) -> PromptLogprobs:
    (token_ids,) = to_device([np.array(targets.token_ids, np.int64)], hidden.device)
    parts, start, num_top = [], 0, 0
    size = 1  # the first slice tells how wide the logits are
    while start < len(token_ids):
        values = logits(hidden[start : start + size])
        parts.append(_of_logits(values, token_ids[start : start + size], targets.num_top))
        start += size
        size = max(1, MAX_SLICE_BYTES // (4 * values.shape[-1]))
        num_top = min(targets.num_top, values.shape[-1])
    # Copied at the end, all at once: a device would have to finish each slice before the next one.
    whole = CopyToHost([torch.cat(column).flatten() for column in zip(*parts, strict=True)])
    tokens, ranks, logprobs = (tuple(array.tolist()) for array in whole.arrays())
    return PromptLogprobs(num_top, tokens, logprobs, ranks)


def _of_logits(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids [rows, num_top + 1], ranks [rows] and log-probabilities, as ids, of some rows."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1))
    top, tokens = logprobs.topk(min(num_top, logprobs.shape[-1]))
    ranks = (logprobs >= chosen).sum(dim=-1)
    ids = torch.cat([token_ids.unsqueeze(-1), tokens], dim=-1)
    return ids, ranks, torch.cat([chosen, top], dim=-1)
