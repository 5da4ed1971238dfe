"""Protobuf <-> `engine.types` and `engine.rpc.messages`, only here. Knows no channel.

Everything that arrives is validated by the typed schemas, so bounds are written down once.
"""

from collections.abc import Iterable

import msgspec

from engine.errors import InvalidRequestError, KVTransferParamsError, TandemError
from engine.rpc.messages import NodeInfo
from engine.rpc.pb import node_pb2 as pb
from engine.types import (
    MAX_KV_TRANSFER_PARAMS_BYTES,
    MAX_TOKENS_IN_REQUEST,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    HandOverProblem,
    KVTransferParams,
    KVTransferStats,
    SamplingParams,
    TokenLogprob,
)

_PLAIN_SAMPLING_FIELDS = tuple(
    name for name in SamplingParams.__struct_fields__ if name not in ("stop_token_ids", "logprobs")
)


def request_to_pb(request: GenerateRequest) -> pb.GenerateRequest:
    """Raises `InvalidRequestError` for numbers that do not fit the wire (a negative token id)."""
    try:
        return pb.GenerateRequest(
            request_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling=_sampling_to_pb(request.sampling),
            kv_transfer_params=_params_to_json(request.kv_transfer_params),
            cache_salt=request.cache_salt,
            priority=request.priority,
        )
    except ValueError as error:
        raise InvalidRequestError(f"request does not fit the wire format: {error}") from error


def request_from_pb(message: pb.GenerateRequest) -> GenerateRequest:
    """Raises `InvalidRequestError` or `KVTransferParamsError` for values out of bounds."""
    _check_counts(message)
    params = _params_from_json(message.kv_transfer_params)
    fields = {
        "request_id": message.request_id,
        "prompt_token_ids": tuple(message.prompt_token_ids),
        "sampling": _sampling_fields(message.sampling),
        "cache_salt": message.cache_salt if message.HasField("cache_salt") else None,
        "priority": message.priority,
    }
    try:
        request = msgspec.convert(fields, GenerateRequest)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(str(error)) from error
    return msgspec.structs.replace(request, kv_transfer_params=params)


def _check_counts(message: pb.GenerateRequest) -> None:
    """Before Python objects are made of them: of 31 million tokens that takes a second."""
    lists = {
        "prompt_token_ids": message.prompt_token_ids,
        "stop_token_ids": message.sampling.stop_token_ids,
    }
    for name, values in lists.items():
        if len(values) > MAX_TOKENS_IN_REQUEST:
            raise InvalidRequestError(
                f"{name} has {len(values)} tokens; at most {MAX_TOKENS_IN_REQUEST} are allowed",
                param=name,
            )


def _sampling_to_pb(sampling: SamplingParams) -> pb.SamplingParams:
    message = pb.SamplingParams(stop_token_ids=sampling.stop_token_ids, logprobs=sampling.logprobs)
    for name in _PLAIN_SAMPLING_FIELDS:
        setattr(message, name, getattr(sampling, name))
    return message


def _sampling_fields(message: pb.SamplingParams) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(message, name) for name in _PLAIN_SAMPLING_FIELDS}
    fields["stop_token_ids"] = tuple(message.stop_token_ids)
    fields["logprobs"] = message.logprobs if message.HasField("logprobs") else None
    return fields


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
        return msgspec.json.decode(data, type=KVTransferParams)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise KVTransferParamsError(f"kv_transfer_params cannot be read: {error}") from error


def output_to_pb(output: GenerateOutput) -> pb.GenerateOutput:
    """An output on its way to the caller."""
    stats = output.kv_transfer
    return pb.GenerateOutput(
        token_ids=output.token_ids,
        logprobs=None if output.logprobs is None else _logprobs_to_pb(output.logprobs),
        finish_reason=output.finish_reason,
        stop_reason=output.stop_reason,
        num_cached_tokens=output.num_cached_tokens,
        kv_transfer_params=_params_to_json(output.kv_transfer_params),
        kv_transfer=None if stats is None else pb.KvTransferStats(**msgspec.structs.asdict(stats)),
    )


def output_from_pb(message: pb.GenerateOutput) -> GenerateOutput:
    """Raises TandemError for an unknown finish reason, KVTransferParamsError for bad params."""
    return GenerateOutput(
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs_from_pb(message.logprobs) if message.HasField("logprobs") else None,
        finish_reason=_finish_reason(message),
        stop_reason=message.stop_reason if message.HasField("stop_reason") else None,
        num_cached_tokens=message.num_cached_tokens,
        kv_transfer_params=_params_from_json(message.kv_transfer_params),
        kv_transfer=_stats_from_pb(message.kv_transfer)
        if message.HasField("kv_transfer")
        else None,
    )


def _finish_reason(message: pb.GenerateOutput) -> FinishReason | None:
    if not message.HasField("finish_reason"):
        return None
    try:
        return FinishReason(message.finish_reason)
    except ValueError as error:
        raise TandemError(f"peer sent an unknown finish_reason: {error}") from error


def _logprobs_to_pb(logprobs: Iterable[TokenLogprob]) -> pb.Logprobs:
    return pb.Logprobs(tokens=[_logprob_to_pb(entry) for entry in logprobs])


def _logprob_to_pb(entry: TokenLogprob) -> pb.TokenLogprob:
    top = [pb.TopLogprob(token_id=token_id, logprob=value) for token_id, value in entry.top]
    return pb.TokenLogprob(token_id=entry.token_id, logprob=entry.logprob, top=top)


def _logprobs_from_pb(message: pb.Logprobs) -> tuple[TokenLogprob, ...]:
    return tuple(_logprob_from_pb(entry) for entry in message.tokens)


def _logprob_from_pb(message: pb.TokenLogprob) -> TokenLogprob:
    top = tuple((entry.token_id, entry.logprob) for entry in message.top)
    return TokenLogprob(message.token_id, message.logprob, top)


def _stats_from_pb(message: pb.KvTransferStats) -> KVTransferStats:
    names = KVTransferStats.__struct_fields__
    return KVTransferStats(**{name: getattr(message, name) for name in names})


def node_info_to_pb(info: NodeInfo) -> pb.NodeInfo:
    """A node's self-description on its way to the proxy."""
    problems = [pb.HandOverProblem(**msgspec.structs.asdict(it)) for it in info.hand_over_problems]
    return pb.NodeInfo(**(msgspec.structs.asdict(info) | {"hand_over_problems": problems}))


def node_info_from_pb(message: pb.NodeInfo) -> NodeInfo:
    """A node's self-description as the proxy reads it."""
    fields = {name: getattr(message, name) for name in NodeInfo.__struct_fields__}
    fields["model_names"] = tuple(message.model_names)
    fields["hand_over_problems"] = tuple(map(_problem_from_pb, message.hand_over_problems))
    return NodeInfo(**fields)


def _problem_from_pb(message: pb.HandOverProblem) -> HandOverProblem:
    names = HandOverProblem.__struct_fields__
    return HandOverProblem(**{name: getattr(message, name) for name in names})
