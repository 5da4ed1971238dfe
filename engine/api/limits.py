"""How many tokens a request may generate. Pure."""

from msgspec import UnsetType

from engine.api.schema import SamplingFields
from engine.errors import InvalidRequestError, PromptTooLongError


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
