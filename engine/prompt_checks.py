"""Checks that a request fits the model, for the border of HTTP and that of the engine. Pure."""

from collections.abc import Sequence

from engine.config import SchedulingPolicy
from engine.errors import InvalidRequestError, KVTransferParamsError, PromptTooLongError
from engine.types import KVTransferParams

FLAGS = frozenset({"do_remote_decode", "do_remote_prefill"})
FIRST_TOKEN = frozenset({"first_token_ids", "first_token_logprobs"})


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


def check_priority(priority: int, policy: SchedulingPolicy) -> None:
    """Raise InvalidRequestError where a client may not choose who is next."""
    if priority and policy != "priority":
        raise InvalidRequestError(
            f"priority={priority} needs nodes that run with --scheduling-policy priority; "
            "leave it out",
            param="priority",
        )


def check_details(params: KVTransferParams) -> None:
    """Raise KVTransferParamsError for details of a remote prefill that is not asked for.

    What D keeps for the next turn comes with all of them but the first token.
    """
    if params.do_remote_prefill:
        return
    every = frozenset(params.__struct_fields__)
    for name in FIRST_TOKEN if params.is_return_pull else sorted(every - FLAGS):
        if getattr(params, name) is not None:
            raise KVTransferParamsError(f"{name} is only accepted with do_remote_prefill=true")


def check_first_token(params: KVTransferParams, vocab_size: int) -> None:
    """Raise KVTransferParamsError when P's first token, or one beside it, is none of the model."""
    logprobs = params.first_token_logprobs or ()
    beside = [token for entry in logprobs for token, _ in entry.top]
    chosen = [entry.token_id for entry in logprobs]
    try:
        check_token_ids(params.first_token_ids or (), vocab_size, "first_token_ids")
        check_token_ids([*chosen, *beside], vocab_size, "first_token_logprobs")
    except InvalidRequestError as error:
        raise KVTransferParamsError(f"kv_transfer_params: {error}") from error
