"""Log-probabilities in OpenAI's two shapes. Knows nothing of requests."""

import math
from collections.abc import Sequence

from engine.api.replies import ChatLogprobs, CompletionLogprobs, ContentLogprob, TopLogprob
from engine.api.tokenizer import Tokenizer
from engine.types import TokenId, TokenLogprob

# JSON has no -inf; this is the floor that vLLM's clients know.
MIN_LOGPROB = -9999.0


def completion_logprobs(
    entries: Sequence[TokenLogprob], tokenizer: Tokenizer, text_offset: int
) -> CompletionLogprobs:
    """Shape of /v1/completions; offsets count characters from the start of the choice's text."""
    tokens = [tokenizer.token_text(entry.token_id) for entry in entries]
    return CompletionLogprobs(
        tokens=tokens,
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        top_logprobs=[_top_object(entry, tokenizer) for entry in entries],
        text_offset=_offsets(tokens, text_offset),
    )


def chat_logprobs(entries: Sequence[TokenLogprob], tokenizer: Tokenizer) -> ChatLogprobs:
    """Shape of /v1/chat/completions, with the exact bytes of each token."""
    return ChatLogprobs(content=[_content(entry, tokenizer) for entry in entries])


def _content(entry: TokenLogprob, tokenizer: Tokenizer) -> ContentLogprob:
    return ContentLogprob(
        token=tokenizer.token_text(entry.token_id),
        logprob=_finite(entry.logprob),
        bytes=list(tokenizer.token_bytes(entry.token_id)),
        top_logprobs=[_top(token_id, value, tokenizer) for token_id, value in entry.top],
    )


def _top(token_id: TokenId, logprob: float, tokenizer: Tokenizer) -> TopLogprob:
    return TopLogprob(
        token=tokenizer.token_text(token_id),
        logprob=_finite(logprob),
        bytes=list(tokenizer.token_bytes(token_id)),
    )


def _top_object(entry: TokenLogprob, tokenizer: Tokenizer) -> dict[str, float]:
    """The alternatives by text, best first; the chosen token is always among them."""
    pairs = (*entry.top, (entry.token_id, entry.logprob))
    found: dict[str, float] = {}
    for token_id, logprob in pairs:
        found.setdefault(tokenizer.token_text(token_id), _finite(logprob))
    return found


def _offsets(tokens: Sequence[str], start: int) -> list[int]:
    offsets = []
    for token in tokens:
        offsets.append(start)
        start += len(token)
    return offsets


def _finite(logprob: float) -> float:
    return MIN_LOGPROB if math.isnan(logprob) else max(logprob, MIN_LOGPROB)
