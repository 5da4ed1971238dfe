"""Logits to tokens on a device: all rows at once, and one copy to the host, which may come late.

The same tokens, log-probabilities and errors as `sampler.sample`, whose rules these are. There a
row is taken after the other, which on a device would make the host wait several times for each.

    launch   parameters, masks and lists of token ids go to the device in one copy; all is queued
    tokens   [rows] on the device: the next step may read them before the host has seen them
    result   waits for the copy of tokens, log-probabilities and what went wrong

Rows that take the highest logit need no more than that. The others are computed in float64:

    | drawn out of all tokens | drawn out of the best few | highest score |
      sorted                    selected, then sorted       not sorted
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
import structlog
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.errors import EngineGenerateError, InvalidRequestError, TandemError
from engine.step import ModelRunnerOutput, SampledToken, SamplingInput
from engine.types import TokenLogprob
from engine.worker.packed_copies import CopyToHost, to_device
from engine.worker.sampler import FAILED, NONE_ALLOWED, broken_logits, takes_the_highest, uniform

FEW = 1024
"""The largest `top_k` that is selected: for a longer list sorting all tokens is no slower."""

MAX_SLICE_BYTES = 128 * 2**20
"""Of the float64 scores that are computed at once; some tensors of this size live together."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

log = structlog.get_logger()


@dataclass(slots=True, frozen=True, kw_only=True)
class _Entries:
    """Numbers for some tokens of a row."""

    ids: Ints
    values: Floats


@dataclass(slots=True, frozen=True, kw_only=True)
class _Row:
    """One row whose scores are not its logits, or that is drawn.

    `allowed`: a bit per token, least significant first, or None if all but `blocked` are.
    """

    row: int
    item: SamplingInput
    bias: _Entries
    seen: _Entries
    counts: _Entries
    blocked: Ints
    allowed: NDArray[np.uint8] | None

    def kind(self, vocab_size: int) -> int:
        """0: drawn out of all tokens, 1: out of the best few, 2: the highest score."""
        params = self.item.params
        if params.temperature == 0.0:
            return 2
        return int(0 < params.top_k <= min(FEW, vocab_size - 1))


@dataclass(slots=True, kw_only=True)
class Sampling:
    """One step's tokens, of which the device knows before the host does.

    `tokens` int64 [rows] on the device, in the order of the inputs; -1 for a row that fails.
    """

    tokens: Tensor
    _inputs: Mapping[str, SamplingInput]
    _errors: dict[int, TandemError]
    _with_logprobs: Sequence[int]
    _drawn: Sequence[int]
    _copy: CopyToHost

    def result(self) -> ModelRunnerOutput:
        """Waits for the copy to the host: one token per request id, or its error."""
        tokens, last, top_tokens, highest, logprobs, top = self._copy.arrays()
        output = ModelRunnerOutput()
        highs, chosen = highest.tolist(), tokens.tolist()
        empty = {row for row, place in zip(self._drawn, last.tolist(), strict=True) if place < 0}
        places = {row: place for place, row in enumerate(self._with_logprobs)}
        for row, (name, item) in enumerate(self._inputs.items()):
            if not isfinite(highs[row]):
                output.failed[name] = broken_logits(name, highs[row])
            elif (error := self._errors.get(row)) is not None:
                output.failed[name] = error
            elif row in empty:
                log.error("sampling failed: no token has a score", request_id=name)
                output.failed[name] = EngineGenerateError(FAILED)
            else:
                logprob = None
                if (count := item.params.logprobs) is not None:
                    own, place = slice(count), places[row]
                    ids, values = top_tokens[place, own].tolist(), top[place, own].tolist()
                    pairs = tuple(zip(ids, values, strict=True))
                    logprob = TokenLogprob(chosen[row], float(logprobs[place]), pairs)
                output.sampled[name] = SampledToken(chosen[row], logprob)
        return output


@dataclass(slots=True)
class _Plan:
    """The rows of a batch, by what is to be done."""

    rows: list[_Row] = field(default_factory=list)
    errors: dict[int, TandemError] = field(default_factory=dict)
    with_logprobs: list[int] = field(default_factory=list)
    num_top: int = 0


def launch(logits: Tensor, inputs: Mapping[str, SamplingInput]) -> Sampling:
    """Queues one token per request id, of float32 `logits` [requests, vocab]; waits for nothing."""
    vocab_size, device = logits.shape[-1], logits.device
    # NaN spreads to the highest: it is finite where all is well.
    highest, tokens = logits.max(dim=-1)
    plan = _plan(inputs, vocab_size)
    drawn: list[int] = []
    last: list[Tensor] = []
    for part in _slices(plan.rows, max(1, MAX_SLICE_BYTES // (8 * vocab_size))):
        part.sort(key=lambda one: one.kind(vocab_size))
        last.append(_choose(logits, part, into=tokens))
        drawn += [one.row for one in part if one.kind(vocab_size) < 2]
    none, no_values = tokens.new_empty(0), highest.new_empty(0)
    found = [(none, no_values, no_values)]
    if plan.with_logprobs:
        (rows,) = to_device([np.array(plan.with_logprobs, np.int64)], device)
        size = max(1, MAX_SLICE_BYTES // (4 * vocab_size))
        parts = torch.split(rows, size)
        found = [_logprobs(logits, own, tokens, num_top=plan.num_top) for own in parts]
    top_tokens, logprobs, top = (_joined(column) for column in zip(*found, strict=True))
    places = _joined(last or [none])
    copy = CopyToHost([tokens, places, top_tokens, highest, logprobs, top])
    # Only now: what a row that fails has chosen is a token for all that was computed so far.
    tokens = tokens.masked_fill(highest.isfinite().logical_not(), -1)
    if drawn or plan.errors:
        of_both = [np.array(list(rows), np.int64) for rows in (drawn, plan.errors)]
        of_drawn, of_errors = to_device(of_both, device)
        own = tokens.index_select(0, of_drawn).masked_fill(places < 0, -1)
        tokens.index_copy_(0, of_drawn, own).index_fill_(0, of_errors, -1)
    return Sampling(
        tokens=tokens,
        _inputs=inputs,
        _errors=plan.errors,
        _with_logprobs=plan.with_logprobs,
        _drawn=drawn,
        _copy=copy,
    )


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))


def _plan(inputs: Mapping[str, SamplingInput], vocab_size: int) -> _Plan:
    plan = _Plan()
    for row, (name, item) in enumerate(inputs.items()):
        if (count := item.params.logprobs) is not None:
            plan.with_logprobs.append(row)
            plan.num_top = max(plan.num_top, min(count, vocab_size))
        if takes_the_highest(item):
            continue
        try:
            plan.rows.append(_prepare(row, item, vocab_size))
        except InvalidRequestError as error:
            plan.errors[row] = error
        # Broad on purpose: one request's values must not end the others of its step.
        except Exception:
            log.exception("sampling failed", request_id=name)
            plan.errors[row] = EngineGenerateError(FAILED)
    return plan


def _prepare(row: int, item: SamplingInput, vocab_size: int) -> _Row:
    """Raises InvalidRequestError if no token is allowed, IndexError for ids outside of the logits.

    A device that reads outside of a tensor stops for good, and so with every request.
    """
    params = item.params
    bias = _entries(params.logit_bias, params.logit_bias.values(), vocab_size)
    seen = _entries(item.seen, [params.repetition_penalty] * len(item.seen), vocab_size)
    counts = _entries(item.counts, item.counts.values(), vocab_size)
    # In float64, as on a CPU: first the product.
    penalties = params.frequency_penalty * counts.values + params.presence_penalty
    blocked = np.fromiter(item.forbidden, np.int64, len(item.forbidden))
    blocked = _checked(blocked[blocked < vocab_size], vocab_size)
    allowed = None
    if item.allowed:
        allowed = _allowed(item.allowed, blocked, vocab_size)
    if allowed is not None or len(blocked) == vocab_size:
        # They are in the mask; and all of them are none, as in `sampler`.
        blocked = blocked[:0]
    return _Row(
        row=row,
        item=item,
        bias=bias,
        seen=seen,
        counts=_Entries(ids=counts.ids, values=penalties),
        blocked=blocked,
        allowed=allowed,
    )


def _entries(ids: Iterable[int], values: Iterable[float], vocab_size: int) -> _Entries:
    tokens = np.fromiter(ids, np.int64)
    return _Entries(ids=_checked(tokens, vocab_size), values=np.fromiter(values, np.float64))


def _checked(ids: Ints, vocab_size: int) -> Ints:
    if len(ids) and not (ids.min() >= 0 and ids.max() < vocab_size):
        raise IndexError(f"token ids {ids.min()} to {ids.max()} of {vocab_size} logits")
    return ids


def _allowed(mask: bytes, forbidden: Ints, vocab_size: int) -> NDArray[np.uint8]:
    """uint8 [ceil(vocab / 8)]: bits of tokens that may be chosen, without the forbidden ones."""
    bits = np.zeros(-(-vocab_size // 8), np.uint8)
    given = np.frombuffer(mask, np.uint8)[: len(bits)]
    bits[: len(given)] = given
    if vocab_size % 8:
        bits[-1] &= (1 << vocab_size % 8) - 1
    without_ends = bits.copy()
    np.bitwise_and.at(without_ends, forbidden >> 3, ~(1 << (forbidden & 7)).astype(np.uint8))
    # Where a grammar allows nothing but the end, it ends before `min_tokens`.
    bits = without_ends if without_ends.any() else bits
    if not bits.any():
        raise InvalidRequestError(NONE_ALLOWED)
    return bits


def _slices(rows: list[_Row], size: int) -> list[list[_Row]]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]


@dataclass(slots=True, frozen=True, kw_only=True)
class _Lists:
    """Parameters of rows [n] and flat lists of token ids, on the device.

    An id of the row at `place` stands as place * vocab + id. `masks` uint8 [m, ceil(vocab / 8)] are
    those of the rows at `masked`.
    """

    rows: Tensor
    top_k: Tensor
    temperature: Tensor
    top_p: Tensor
    min_p: Tensor
    number: Tensor
    bias: tuple[Tensor, Tensor]
    seen: tuple[Tensor, Tensor]
    counts: tuple[Tensor, Tensor]
    blocked: Tensor
    masked: Tensor
    masks: Tensor


def _send(rows: Sequence[_Row], vocab_size: int, device: torch.device) -> _Lists:
    """In one copy."""
    params = [one.item.params for one in rows]
    starts = [place * vocab_size for place in range(len(rows))]
    masked = [place for place, one in enumerate(rows) if one.allowed is not None]
    masks = [one.allowed for one in rows if one.allowed is not None]
    size = -(-vocab_size // 8)

    def flat(entries: Callable[[_Row], Ints]) -> Ints:
        own = [entries(one) + start for one, start in zip(rows, starts, strict=True)]
        return np.concatenate(own)

    def values(entries: Callable[[_Row], Floats]) -> Floats:
        return np.concatenate([entries(one) for one in rows])

    limits = [one.top_k if one.top_k > 0 else vocab_size for one in params]
    arrays: dict[str, NDArray[Any]] = {
        "rows": np.array([one.row for one in rows], np.int64),
        "top_k": np.array([min(limit, vocab_size) for limit in limits], np.int64),
        "temperature": np.array([one.temperature for one in params], np.float64),
        "top_p": np.array([one.top_p for one in params], np.float64),
        "min_p": np.array([one.min_p for one in params], np.float64),
        "number": np.array([uniform(one.item.params.seed, one.item.position) for one in rows]),
        "blocked": flat(lambda one: one.blocked),
        "masked": np.array(masked, np.int64),
        "masks": np.array(masks, np.uint8).reshape(len(masks), size),
    }
    pairs = [
        (flat(lambda one: one.bias.ids), values(lambda one: one.bias.values)),
        (flat(lambda one: one.seen.ids), values(lambda one: one.seen.values)),
        (flat(lambda one: one.counts.ids), values(lambda one: one.counts.values)),
    ]
    sent = to_device([*arrays.values(), *(array for pair in pairs for array in pair)], device)
    named = dict(zip(arrays, sent, strict=False))
    bias, seen, counts = zip(sent[-6::2], sent[-5::2], strict=True)
    return _Lists(**named, bias=bias, seen=seen, counts=counts)


def _choose(logits: Tensor, rows: Sequence[_Row], *, into: Tensor) -> Tensor:
    """Writes the tokens of `rows`, sorted by kind, to `into` [requests].

    Returns, for the rows that are drawn, the place of the last token that might be: -1 for none.
    """
    vocab_size = logits.shape[-1]
    lists = _send(rows, vocab_size, logits.device)
    scores = _scores(logits, lists)
    kinds = [one.kind(vocab_size) for one in rows]
    all_end, few_end = kinds.count(0), len(kinds) - kinds.count(2)
    params = [one.item.params for one in rows]
    chosen, last = [], []
    if few_end > 0:
        scores[:few_end] /= lists.temperature[:few_end].unsqueeze(-1)
    if all_end > 0:
        every = slice(0, all_end)
        values, tokens = scores[every].sort(dim=-1, descending=True, stable=True)
        has_top_p = any(one.top_p < 1.0 for one in params[every])
        found = _draw(values, tokens, lists, own=every, has_top_p=has_top_p)
        chosen.append(found[0])
        last.append(found[1])
    if few_end > all_end:
        few = slice(all_end, few_end)
        width = max(one.top_k for one in params[few])
        values, tokens = best(scores[few], lists.top_k[few], width)
        has_top_p = any(one.top_p < 1.0 for one in params[few])
        found = _draw(values, tokens, lists, own=few, has_top_p=has_top_p)
        chosen.append(found[0])
        last.append(found[1])
    if few_end < len(rows):
        chosen.append(scores[few_end:].argmax(dim=-1))
    into.index_copy_(0, lists.rows, torch.cat(chosen))
    return torch.cat(last) if last else into.new_empty(0)


def _scores(logits: Tensor, lists: _Lists) -> Tensor:
    """float64 [n, vocab]: logits with bias and penalties, minus infinity where tokens are barred.

    No token stands twice in a list, so nothing depends on the order of writes.
    """
    scores = logits.index_select(0, lists.rows).double()
    flat = scores.view(-1)
    if len(lists.bias[0]):
        flat.index_add_(0, *lists.bias)
    if len(lists.seen[0]):
        places, penalty = lists.seen
        values = flat.index_select(0, places)
        flat.index_copy_(0, places, torch.where(values > 0, values / penalty, values * penalty))
    if len(lists.counts[0]):
        flat.index_add_(0, *lists.counts, alpha=-1)
    if len(lists.masked):
        bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
        is_allowed = (lists.masks.unsqueeze(-1) >> bits) & 1
        barred = is_allowed.flatten(1)[:, : scores.shape[1]] == 0
        own = scores.index_select(0, lists.masked).masked_fill_(barred, -torch.inf)
        scores.index_copy_(0, lists.masked, own)
    if len(lists.blocked):
        flat.index_fill_(0, lists.blocked, -torch.inf)
    return scores


def best(scores: Tensor, top_k: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Begins like a stable descending sort of each row of float64 `scores` [n, vocab].

    Returns scores and token ids [n, width], right in the first `top_k` [n] of each row, which is at
    most `width`. `topk` alone does not say which of equal scores it takes, nor in which order:

        score   9 7 5 5 | 5 5     top_k = 4: those above the fourth are sure, of the others that
                ^^^ above           equal it the lowest ids are taken
    """
    vocab_size = scores.shape[1]
    values, tokens = scores.topk(width, dim=-1)
    bound = values.gather(1, top_k.unsqueeze(-1) - 1)
    ids = torch.arange(vocab_size, dtype=torch.int32, device=scores.device)
    # The lowest ids are the largest distances from the end.
    ties = torch.where(scores == bound, vocab_size - ids, 0).topk(width, dim=-1).values
    is_above = values > bound
    places = torch.arange(width, device=scores.device)
    after = (places - is_above.sum(dim=-1, keepdim=True)).clamp_(min=0)
    # Where a row has NaN there are no ties: also its tokens must exist.
    lowest = (vocab_size - ties.gather(1, after).long()).clamp_(max=vocab_size - 1)
    tokens = torch.where(is_above, tokens, lowest)
    values = torch.where(is_above, values, bound)
    beyond = places >= top_k.unsqueeze(-1)
    # By id, then stably by score; what is beyond comes last in both.
    tokens, order = tokens.masked_fill(beyond, vocab_size).sort(dim=-1)
    values = values.masked_fill(beyond, -torch.inf).gather(1, order)
    values, order = values.sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(1, order)


def _draw(
    ordered: Tensor, tokens: Tensor, lists: _Lists, *, own: slice, has_top_p: bool
) -> tuple[Tensor, Tensor]:
    """Inverse transform over sorted scores [n, width], after top-k, top-p and min-p, as `sampler`.

    Returns the tokens [n], and the place of the last one that might be drawn, -1 for none.
    """
    places = torch.arange(ordered.shape[1], device=ordered.device)
    within = places < lists.top_k[own].unsqueeze(-1)
    probabilities = ordered.masked_fill(~within, -torch.inf).softmax(dim=-1)
    keep = within & (probabilities >= lists.min_p[own].unsqueeze(-1) * probabilities[:, :1])
    if has_top_p:
        top_p = lists.top_p[own].unsqueeze(-1)
        # Rounding may bring the mass before a token to 1.
        keep &= (probabilities.cumsum(dim=-1) - probabilities < top_p) | (top_p >= 1.0)
    cumulative = (probabilities * keep).cumsum(dim=-1)
    targets = lists.number[own].unsqueeze(-1) * cumulative[:, -1:]
    place = torch.searchsorted(cumulative, targets, right=True)
    last = torch.where(keep, places, -1).amax(dim=-1, keepdim=True)
    chosen = tokens.gather(1, torch.minimum(place, last).clamp_(min=0))
    return chosen.squeeze(-1), last.squeeze(-1)


def _logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, *, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of `rows` [n]: ids of the most likely tokens [n, top], the chosen one's value [n], theirs."""
    logprobs = logits.index_select(0, rows).log_softmax(dim=-1)
    values, ids = logprobs.topk(num_top, dim=-1)
    chosen = logprobs.gather(1, tokens.index_select(0, rows).unsqueeze(-1))
    return ids, chosen.squeeze(-1), values
