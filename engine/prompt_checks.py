"""Checks that a request fits the model, for the border of HTTP and that of the engine. Pure."""

from collections.abc import Sequence

from engine.errors import InvalidRequestError, PromptTooLongError
from engine.types import MAX_BAD_WORD_TOKENS, MAX_PROMPT_LOGPROBS, BadWord, SchedulingPolicy

MAX_PROMPT_LOGPROBS_IN_REPLY = 1_048_576  # of all sequences: 2 s of encoding, 56 MB


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
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt "
            f"has {len(token_ids)} tokens: shorten it to at most {max_model_len - 1}.",
            param="prompt",
            code="context_length_exceeded",
        )
    check_token_ids(token_ids, vocab_size, "prompt")


def check_output(token_ids: Sequence[int], *, room: int, vocab_size: int) -> None:
    """Raise InvalidRequestError for an output so far that is wrong or leaves nothing to generate.

    `room`: tokens that the whole output may have.
    """
    if token_ids and len(token_ids) >= room:
        raise InvalidRequestError(
            f"output_token_ids has {len(token_ids)} tokens, which must be fewer than {room}: "
            "max_tokens and the context allow no more",
            param="output_token_ids",
        )
    check_token_ids(token_ids, vocab_size, "output_token_ids")


def check_prompt_logprobs(num_tokens: int, num_top: int | None) -> None:
    """Raise InvalidRequestError where a prompt's log-probabilities would be too many."""
    most = MAX_PROMPT_LOGPROBS // ((num_top or 0) + 1)
    if num_top is not None and num_tokens > most:
        raise InvalidRequestError(
            f"prompt_logprobs={num_top}: a prompt of {num_tokens} tokens has too many; ask for "
            f"fewer alternatives, or send at most {most} tokens",
            param="prompt_logprobs",
        )


def check_all_prompt_logprobs(num_tokens: int, num_top: int | None) -> None:
    """Raise InvalidRequestError where those of all sequences would make too long a reply."""
    most = MAX_PROMPT_LOGPROBS_IN_REPLY // ((num_top or 0) + 1)
    if num_top is not None and num_tokens > most:
        raise InvalidRequestError(
            f"prompt_logprobs={num_top}: the prompts of all sequences are {num_tokens} tokens, at "
            f"most {most} are told in one reply: ask for fewer alternatives, prompts or choices",
            param="prompt_logprobs",
        )


def check_bad_words(words: Sequence[BadWord], vocab_size: int) -> None:
    """Raise InvalidRequestError for too many tokens in all words, or for wrong ones."""
    num_tokens = sum(len(word.token_ids) for word in words)
    if num_tokens > MAX_BAD_WORD_TOKENS:
        raise InvalidRequestError(
            f"bad_words are {num_tokens} tokens, each as it is written at a start and after a "
            f"space: at most {MAX_BAD_WORD_TOKENS} are taken together",
            param="bad_words",
        )
    for word in words:
        check_token_ids(word.token_ids, vocab_size, "bad_words")


def check_priority(priority: int, policy: SchedulingPolicy) -> None:
    """Raise InvalidRequestError where a client may not choose who is next."""
    if priority and policy != "priority":
        raise InvalidRequestError(
            f"priority={priority} needs nodes that run with --scheduling-policy priority; "
            "leave it out",
            param="priority",
        )
