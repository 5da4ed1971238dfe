"""Protobuf <-> structs, only here.

`to_pb` and `from_pb` translate where both have the same field names. Requests and outputs, which
differ in a few fields, have functions of their own. The types of the structs check what arrives.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import msgspec
from google.protobuf.message import Message

from engine.errors import InvalidRequestError, KVTransferParamsError, TandemError
from engine.struct_types import learned
from engine.types import (
    MAX_KV_TRANSFER_PARAMS_BYTES,
    MAX_TOKENS_IN_REQUEST,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    KVTransferParams,
    KVTransferStats,
    PromptLogprobs,
    TokenLogprob,
)
from serving.rpc.pb import node_pb2 as pb

M = TypeVar("M", bound=Message)
S = TypeVar("S", bound=msgspec.Struct)


def to_pb(value: msgspec.Struct, kind: type[M]) -> M:
    """`value` as a message of `kind`; None leaves an `optional` field unset."""
    return kind(**msgspec.to_builtins(value, builtin_types=(bytes,)))


def from_pb(message: Message, kind: type[S]) -> S:
    """`message` as a struct of `kind`. Raises `InvalidRequestError` for values out of bounds."""
    return _checked(_fields_of(message), kind)


def prompt_to_bytes(request: GenerateRequest) -> bytes:
    """The prompt alone, as `request_to_bytes` takes it, for a caller that sends it several times.

    Raises `InvalidRequestError` for numbers that do not fit the wire (a negative token id).
    """
    with _fitting_the_wire():
        message = pb.GenerateRequest(prompt_token_ids=request.prompt_token_ids)
    return message.SerializeToString()


def request_to_bytes(request: GenerateRequest, prompt: bytes) -> bytes:
    """`request` serialized, with its prompt from `prompt_to_bytes`; raises as that does."""
    with _fitting_the_wire():
        others = pb.GenerateRequest(
            request_id=request.request_id,
            sampling=to_pb(request.sampling, pb.SamplingParams),
            kv_transfer_params=_params_to_json(request.kv_transfer_params),
            cache_salt=request.cache_salt,
            priority=request.priority,
            output_token_ids=request.output_token_ids,
            cache_boundaries=request.cache_boundaries,
            tenant=request.tenant,
        )
    # Protobuf's fields may come in any order, so two messages in a row are one with both's fields.
    return others.SerializeToString() + prompt


def request_from_pb(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises `InvalidRequestError` or `KVTransferParamsError` for values out of bounds."""
    # The counts come first: Python objects of 31 million tokens take a second.
    lists = {
        "prompt_token_ids": message.prompt_token_ids,
        "output_token_ids": message.output_token_ids,
        "stop_token_ids": message.sampling.stop_token_ids,
        "cache_boundaries": message.cache_boundaries,
    }
    for name, values in lists.items():
        if len(values) > MAX_TOKENS_IN_REQUEST:
            raise InvalidRequestError(
                f"{name} has {len(values)} tokens; at most {MAX_TOKENS_IN_REQUEST} are allowed",
                param=name,
            )
    fields = _fields_of(message)
    fields["kv_transfer_params"] = _params_from_json(message.kv_transfer_params)
    # An absent message counts as zeros, which are out of bounds, and not as our defaults.
    fields["sampling"] = _fields_of(message.sampling)
    return _checked(fields, GenerateRequest)


def output_to_pb(output: GenerateOutput) -> pb.GenerateOutput:
    """An output on its way to the caller. Written out, since each token passes here."""
    logprobs, stats, prompt = output.logprobs, output.kv_transfer, output.prompt_logprobs
    return pb.GenerateOutput(
        token_ids=output.token_ids,
        logprobs=None if logprobs is None else pb.Logprobs(tokens=map(_logprob_to_pb, logprobs)),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        num_tokens_lost_to_state=output.num_tokens_lost_to_state,
        kv_transfer_params=_params_to_json(output.kv_transfer_params),
        kv_transfer=None if stats is None else to_pb(stats, pb.KvTransferStats),
        prompt_logprobs=None if prompt is None else to_pb(prompt, pb.PromptLogprobs),
    )


def output_from_pb(message: pb.GenerateOutput) -> GenerateOutput:
    """Raises TandemError for an unknown finish reason, KVTransferParamsError for bad params."""
    # Written out like its counterpart; fields that are absent stay None, not zero.
    has, logprobs, finish_reason = message.HasField, None, None
    prompt_logprobs = None
    if has("prompt_logprobs"):
        prompt_logprobs = from_pb(message.prompt_logprobs, PromptLogprobs)
    if has("logprobs"):
        logprobs = tuple(map(_logprob_from_pb, message.logprobs.tokens))
    if has("finish_reason"):
        try:
            finish_reason = FinishReason(message.finish_reason)
        except ValueError as error:
            raise TandemError(f"peer sent an unknown finish_reason: {error}") from error
    return GenerateOutput(
        token_ids=tuple(message.token_ids),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason=finish_reason,
        stop_reason=message.stop_reason if has("stop_reason") else None,
        num_cached_tokens=message.num_cached_tokens,
        num_tokens_lost_to_state=message.num_tokens_lost_to_state,
        kv_transfer_params=_params_from_json(message.kv_transfer_params),
        kv_transfer=from_pb(message.kv_transfer, KVTransferStats) if has("kv_transfer") else None,
    )


@contextmanager
def _fitting_the_wire() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise InvalidRequestError(f"request does not fit the wire format: {error}") from error


def _fields_of(message: Message) -> dict[str, Any]:
    """Field name to plain value; fields that know that they are unset are left out."""
    fields: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value, kind = getattr(message, field.name), field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            fields[field.name] = dict(value)
        elif field.is_repeated:
            fields[field.name] = tuple(value) if kind is None else tuple(map(_fields_of, value))
        else:
            fields[field.name] = value if kind is None else _fields_of(value)
    return fields


def _checked(fields: dict[str, Any], kind: type[S]) -> S:
    try:
        return msgspec.convert(fields, learned(kind))
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from error


def _params_to_json(params: KVTransferParams | None) -> bytes:
    return b"" if params is None else msgspec.json.encode(params)


def _params_from_json(data: bytes) -> KVTransferParams | None:
    if not data:
        return None
    if len(data) > MAX_KV_TRANSFER_PARAMS_BYTES:
        raise KVTransferParamsError(
            f"kv_transfer_params: {len(data)} bytes, {MAX_KV_TRANSFER_PARAMS_BYTES} are allowed"
        )
    try:
        return msgspec.json.decode(data, type=learned(KVTransferParams))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KVTransferParamsError(f"kv_transfer_params cannot be read: {error}") from error


def _logprob_to_pb(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def _logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)
