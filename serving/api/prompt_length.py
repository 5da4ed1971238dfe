"""Prompts and outputs against the context: what is cut, and how many tokens may come. Pure."""

from collections.abc import Sequence

from msgspec import UnsetType

from engine.errors import InvalidRequestError, PromptTooLongError
from engine.types import TokenId
from serving.api.schema import SamplingFields
from serving.api.serving import Serving


def cut_prompts(
    fields: SamplingFields, prompts: Sequence[tuple[TokenId, ...]], serving: Serving
) -> Sequence[tuple[TokenId, ...]]:
    """The last `truncate_prompt_tokens` tokens of each prompt; -1: as many as leave room.

    Raises InvalidRequestError where that is none.
    """
    most = fields.truncate_prompt_tokens
    if most is None:
        return prompts
    if most > serving.max_model_len:
        raise InvalidRequestError(
            f"truncate_prompt_tokens={most} is more than max_model_len={serving.max_model_len}",
            param="truncate_prompt_tokens",
        )
    if most == 0:
        raise InvalidRequestError(
            "truncate_prompt_tokens=0 leaves no prompt: ask for 1 or more, for -1 to fit the "
            "context, or leave it out",
            param="truncate_prompt_tokens",
        )
    if most == -1:
        most = _room_beside_output(fields, serving)
    return [prompt[-most:] for prompt in prompts]


def _room_beside_output(fields: SamplingFields, serving: Serving) -> int:
    """Tokens that a prompt may have, at least 1."""
    requested = _requested(fields, remote_decode=False) or 1
    if requested >= serving.max_model_len:
        raise PromptTooLongError(
            f"This model's maximum context length is {serving.max_model_len} tokens. However, "
            f"max_tokens={requested} leaves no room for a prompt: ask for at most "
            f"{serving.max_model_len - 1}.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return serving.max_model_len - requested


def resolve_max_tokens(
    fields: SamplingFields,
    serving: Serving,
    num_prompt_tokens: int,
    *,
    default: int | None,
    remote_decode: bool,
) -> int:
    """Tokens to generate: as asked, else the default cut to the room, else all the room.

    `num_prompt_tokens` is the length of the longest prompt, less than the context.
    `max_completion_tokens` goes before `max_tokens`, as in vLLM, except in a remote decode: PD
    proxies set `max_tokens` to 1 beside whatever the client sent.
    """
    requested = _requested(fields, remote_decode=remote_decode)
    room = serving.max_model_len - num_prompt_tokens
    if requested is None:
        return room if default is None else min(default, room)
    if requested < 1:
        raise InvalidRequestError(
            f"max_tokens={requested}: must be at least 1, or 0 with echo", param="max_tokens"
        )
    if requested > room:
        raise PromptTooLongError(
            f"This model's maximum context length is {serving.max_model_len} tokens. However, you "
            f"requested {num_prompt_tokens + requested}: {num_prompt_tokens} in the prompt and "
            f"max_tokens={requested}. Ask for at most {room}, or shorten the prompt.",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return requested


def _requested(fields: SamplingFields, *, remote_decode: bool) -> int | None:
    max_tokens = None if isinstance(fields.max_tokens, UnsetType) else fields.max_tokens
    asked = [fields.max_completion_tokens, max_tokens]
    if remote_decode:
        asked.reverse()
    return next((it for it in asked if it is not None), None)
