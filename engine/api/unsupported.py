"""Keys that OpenAI and vLLM know and we do not serve: fine while they ask for nothing.

Knows no other keys.
"""

from typing import Any

from engine.errors import InvalidRequestError

# Labels for the caller's own bookkeeping; they change no token.
IGNORED = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)

# Every key also accepts null, false, "", [] and {}; the tuple holds what else is neutral.
NEUTRAL: dict[str, tuple[object, ...]] = {
    "allowed_token_ids": (),
    "audio": (),
    "bad_words": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (),
    "detokenize": (True,),
    "documents": (),
    "echo": (),
    "ec_transfer_params": (),
    "function_call": ("none", "auto"),
    "functions": (),
    "guided_choice": (),
    "guided_decoding_backend": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "length_penalty": (1.0,),
    "logit_bias": (),
    "logits_processors": (),
    "mm_processor_kwargs": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "prediction": (),
    "prompt_embeds": (),
    "prompt_logprobs": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "return_tokens_as_token_ids": (),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "suffix": (),
    "tool_choice": ("none", "auto"),
    "tools": (),
    "truncate_prompt_tokens": (),
    "use_beam_search": (),
    "verbosity": ("medium",),
    "vllm_xargs": (),
    "web_search_options": (),
}

_EMPTY: tuple[object, ...] = (None, False, "", [], {})


def without_neutral(body: dict[str, Any]) -> dict[str, Any]:
    """The body without ignored labels and without unsupported keys that ask for nothing.

    Raises InvalidRequestError that names the first unsupported key with a value that matters.
    """
    for key in NEUTRAL.keys() & body.keys():
        _require_neutral(key, body[key])
    return {key: value for key, value in body.items() if key not in NEUTRAL and key not in IGNORED}


def _require_neutral(key: str, value: object) -> None:
    if not any(type(value) is type(ok) and value == ok for ok in (*_EMPTY, *NEUTRAL[key])):
        raise InvalidRequestError(
            f"{key}={repr(value)[:80]} is not supported: leave {key} out", param=key
        )
