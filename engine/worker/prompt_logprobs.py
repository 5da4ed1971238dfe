"""Log-probabilities of the tokens of prompts, from the hidden states of a prefill.

The logits of a whole chunk may take more memory than the model: they are made slice by slice, each
request for itself, so that what one asks for does not round another's.
"""

from collections.abc import Callable, Sequence
from itertools import chain

import torch
from torch import Tensor

from engine.step import PromptTargets, ScheduledRequest
from engine.types import PromptLogprobs

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
    token_ids = torch.tensor(targets.token_ids, device=hidden.device)
    parts, start, num_top = [], 0, 0
    size = 1  # the first slice tells how wide the logits are
    while start < len(token_ids):
        values = logits(hidden[start : start + size])
        parts.append(_of_logits(values, token_ids[start : start + size], targets.num_top))
        start += size
        size = max(1, MAX_SLICE_BYTES // (4 * values.shape[-1]))
        num_top = min(targets.num_top, values.shape[-1])
    columns = (tuple(chain.from_iterable(column)) for column in zip(*parts, strict=True))
    return PromptLogprobs(num_top, *columns)


def _of_logits(
    logits: Tensor, token_ids: Tensor, num_top: int
) -> tuple[list[int], list[float], list[int]]:
    """Columns of `PromptLogprobs` for some rows."""
    logprobs = logits.log_softmax(dim=-1)
    chosen = logprobs.gather(-1, token_ids.unsqueeze(-1))
    top, tokens = logprobs.topk(min(num_top, logprobs.shape[-1]))
    ranks = (logprobs >= chosen).sum(dim=-1)
    return (
        torch.cat([token_ids.unsqueeze(-1), tokens], dim=-1).flatten().tolist(),
        torch.cat([chosen, top], dim=-1).flatten().tolist(),
        ranks.tolist(),
    )
