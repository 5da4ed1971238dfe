"""Checks a prompt and its token budget against the model's limits. Pure."""

from collections.abc import Sequence

from msgspec import UnsetType

from engine.api.schema import SamplingFields
from engine.errors import InvalidRequestError, PromptTooLongError


def check_token_ids(token_ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise InvalidRequestError that names the first id outside 0 .. vocab_size - 1."""
    if not token_ids or (min(token_ids) >= 0 and max(token_ids) < vocab_size):
        return
    wrong = next(token for token in token_ids if not 0 <= token < vocab_size)
    raise InvalidRequestError(
        f"{param}: token id {wrong} is outside 0 .. {vocab_size - 1}", param=param
    )


def check_prompt(token_ids: Sequence[int], *, vocab_size: int, max_model_len: int) -> None:
    """Raise InvalidRequestError for a wrong prompt, PromptTooLongError for a long one."""
    if not token_ids:
        raise InvalidRequestError("the prompt is empty: send at least one token", param="prompt")
    if len(token_ids) >= max_model_len:
        raise PromptTooLongError(
            f"the prompt has {len(token_ids)} tokens and max_model_len is {max_model_len}: "
            f"shorten it to at most {max_model_len - 1} tokens",
            param="prompt",
            code="context_length_exceeded",
        )
    check_token_ids(token_ids, vocab_size, "prompt")


def resolve_max_tokens(
    requested: int | None, *, default: int | None, prompt_tokens: int, max_model_len: int
) -> int:
    """Tokens to generate: as asked, else the default cut to the room, else all the room.

    `prompt_tokens` is the length of the longest prompt, less than `max_model_len`.
    """
    room = max_model_len - prompt_tokens
    if requested is None:
        return room if default is None else min(default, room)
    if requested < 1:
        raise InvalidRequestError(f"max_tokens={requested}: must be at least 1", param="max_tokens")
    if requested > room:
        raise PromptTooLongError(
            f"max_tokens={requested} does not fit: max_model_len is {max_model_len} and the prompt "
            f"has {prompt_tokens} tokens; ask for at most {room} or shorten the prompt",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return requested


def requested_max_tokens(fields: SamplingFields, *, remote_decode: bool) -> int | None:
    """`max_completion_tokens` goes before `max_tokens`, as in vLLM.

    Except in a remote decode: PD proxies set `max_tokens` to 1 beside whatever the client sent.
    """
    max_tokens = None if isinstance(fields.max_tokens, UnsetType) else fields.max_tokens
    first, second = fields.max_completion_tokens, max_tokens
    if remote_decode:
        first, second = second, first
    return second if first is None else first
