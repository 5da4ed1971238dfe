"""Request bodies of the OpenAI surface, field by field. Knows nothing of tokens, limits or replies.

Unknown keys are errors; `engine.api.unsupported` has taken out the known ones that ask for nothing.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from engine.types import MAX_LOGPROBS, MAX_STOP_STRINGS

MAX_CHOICES = 64
MAX_PROMPTS = 64
MAX_SEQUENCES = 128  # of one request; an eighth of what may wait on a node
MAX_STOP_TOKEN_IDS = 256
MAX_MESSAGES = 16_384

_StopString = Annotated[str, Meta(min_length=1, max_length=1024)]
_Label = Annotated[str, Meta(max_length=256)]
_Int32 = Annotated[int, Meta(ge=-(2**31), le=2**31 - 1)]
_TokenIds = Annotated[list[int], Meta(max_length=MAX_STOP_TOKEN_IDS)]


class _Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every request body."""


class StreamOptions(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a stream tells besides tokens; `continuous_usage_stats` is vLLM's."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class SamplingFields(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both generating endpoints accept; bounds of sampling values live in `SamplingParams`."""

    model: str | None = None
    max_tokens: int | UnsetType | None = UNSET
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: _StopString | Annotated[list[_StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = (
        None
    )
    stop_token_ids: _TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    priority: _Int32 | None = None
    request_id: _Label | None = None


Prompt = str | list[str | int | list[int]]


class CompletionRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/completions. `prompt` is one or several texts or lists of token ids."""

    prompt: Prompt
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="text"):
    """The one kind of content part that a text model takes."""

    text: str

    def __post_init__(self) -> None:
        """Python between any two parts: other threads may go on while millions are decoded."""


class Message(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One turn.

    The keys after `name` come back from the openai client's own reply objects, as null.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: _Label | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: None = None
    annotations: tuple[()] | None = None
    audio: None = None
    function_call: None = None
    tool_calls: tuple[()] | None = None

    def __post_init__(self) -> None:
        """Python between any two messages: other threads may go on while millions are decoded."""

    def for_template(self) -> dict[str, str]:
        """The turn as chat templates read it; text parts are joined by line feeds, as vLLM does."""
        parts = self.content
        text = parts if isinstance(parts, str) else "\n".join(part.text for part in parts)
        extras = {"name": self.name, "reasoning_content": self.reasoning_content or self.reasoning}
        return {
            "role": self.role,
            "content": text,
            **{key: value for key, value in extras.items() if value is not None},
        }


Messages = Annotated[list[Message], Meta(min_length=1, max_length=MAX_MESSAGES)]
TemplateExtras = Annotated[dict[_Label, Any], Meta(max_length=64)]


class ChatRequest(SamplingFields, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /v1/chat/completions."""

    messages: Messages
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: TemplateExtras | None = None


class TokenizeRequest(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /tokenize, with either a prompt or messages; the shape is vLLM's."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: TemplateExtras | None = None


class DetokenizeRequest(_Body, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]
