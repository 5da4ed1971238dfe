"""Protobuf and back is the identity for all that the types hold; the rest is refused."""

import math
import time
from typing import Any

import msgspec
import pytest

from connector.pd.wire.messages import BlockRange, DigestsQuestion, Handshake
from engine.errors import InvalidRequestError, KVTransferParamsError, TandemError
from engine.types import (
    MAX_KV_TRANSFER_PARAMS_BYTES,
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    KVTransferParams,
    KVTransferStats,
    SamplingParams,
    TokenLogprob,
)
from serving.rpc import convert
from serving.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo
from serving.rpc.pb import node_pb2 as pb

PARAMS = KVTransferParams(
    do_remote_prefill=True,
    remote_engine_id="p-1",
    remote_request_id="r-1",
    remote_block_ids=((0, 1), (), (7,)),
    remote_filled_from=(0, 96, 0),
    remote_host="127.0.0.1",
    remote_port=5600,
    remote_num_tokens=33,
    tp_size=1,
    first_token_ids=(5,),
    first_token_logprobs=(TokenLogprob(5, -0.1, ((5, -0.1), (6, -2.7182818284590451))),),
    remote_num_cached_tokens=16,
    signature="ab" * 32,
)
SAMPLING = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.1,
    top_p=1 / 3,
    top_k=-1,
    min_p=0.05,
    presence_penalty=-1.5,
    frequency_penalty=0.3,
    repetition_penalty=1.1,
    seed=-(2**63),
    stop_token_ids=(0, 2**31),
    ignore_eos=True,
    logprobs=0,
)
REQUESTS = [
    GenerateRequest(request_id="r", prompt_token_ids=(1, 2, 3)),
    GenerateRequest(
        request_id="ünïcode\n",
        prompt_token_ids=(2**32 - 1, 0),
        sampling=SAMPLING,
        kv_transfer_params=PARAMS,
        cache_salt="",
        priority=-3,
        cache_boundaries=(16, 1, 2**22),
    ),
]
OUTPUTS = [
    GenerateOutput(),
    GenerateOutput(token_ids=(1,), logprobs=()),
    GenerateOutput(
        token_ids=(1, 2),
        logprobs=(TokenLogprob(1, -0.30000000000000004, ((1, -math.inf),)), TokenLogprob(2, 0.0)),
        finish_reason=FinishReason.STOP,
        stop_reason=0,
        num_cached_tokens=16,
        num_tokens_lost_to_state=3,
        kv_transfer_params=PARAMS,
        kv_transfer=KVTransferStats(
            attention_bytes=2**40, state_bytes=1, transfer_ms=0.1, verified=True
        ),
    ),
]


def bytes_of(request: GenerateRequest) -> bytes:
    return convert.request_to_bytes(request, convert.prompt_to_bytes(request))


@pytest.mark.parametrize("request_", REQUESTS)
def test_request_survives_the_wire(request_: GenerateRequest) -> None:
    data = bytes_of(request_)
    assert convert.request_from_pb(pb.GenerateRequest.FromString(data)) == request_


@pytest.mark.parametrize("output", OUTPUTS)
def test_output_survives_the_wire(output: GenerateOutput) -> None:
    data = convert.output_to_pb(output).SerializeToString()
    assert convert.output_from_pb(pb.GenerateOutput.FromString(data)) == output


EVENTS = KVEventsInfo(
    endpoint="tcp://10.0.0.1:5557",
    topic="kv@pod@model",
    hash_block_size=16,
    hash_seed="ünïcode",
    groups=(KVGroupInfo("mamba"), KVGroupInfo("sliding_window", 2**31), KVGroupInfo("mamba", 0)),
    replay_endpoint="tcp://[::1]:5558",
    model_identity="0123456789abcdef" * 2,
)


@pytest.mark.parametrize(
    "events", [None, EVENTS, msgspec.structs.replace(EVENTS, replay_endpoint=None)]
)
def test_a_node_s_description_survives_the_wire(events: KVEventsInfo | None) -> None:
    info = NodeInfo(
        engine_id="p-1",
        kind="prefill",
        model_names=("m",),
        max_model_len=4096,
        vocab_size=300,
        num_waiting_tokens=2**40,
        prefill_tokens_per_s=1e5 / 3,
        decode_tokens_per_s=0.1,
        link_bytes_per_s=1e12,
        kv_bytes_per_token=2**33,
        state_bytes=2**50,
        kv_events=events,
    )
    data = convert.to_pb(info, pb.NodeInfo).SerializeToString()
    assert convert.from_pb(pb.NodeInfo.FromString(data), NodeInfo) == info


@pytest.mark.parametrize(
    "wrong",
    [
        {"prefill_tokens_per_s": -1.0},
        {"decode_tokens_per_s": math.nan},
        {"link_bytes_per_s": -math.inf},
        {"kv_events": msgspec.structs.replace(EVENTS, hash_block_size=0)},
        {"kv_events": msgspec.structs.replace(EVENTS, groups=())},
    ],
)
def test_a_description_that_routing_cannot_count_with_is_refused(wrong: dict[str, Any]) -> None:
    """One such node would break the choice for every request, or seem to hold every prompt."""
    message = convert.to_pb(
        NodeInfo(engine_id="p", kind="", model_names=(), max_model_len=1, vocab_size=1, **wrong),
        pb.NodeInfo,
    )
    with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
        convert.from_pb(message, NodeInfo)


def test_control_messages_survive_the_wire() -> None:
    info = NodeInfo(
        engine_id="d-1",
        kind="decode",
        model_names=("m", "alias"),
        max_model_len=4096,
        vocab_size=300,
        num_requests_running=1,
        num_requests_waiting=2,
        kv_cache_usage=0.25,
        reason="draining",
    )
    handshake = Handshake(
        engine_id="p",
        transport="shm",
        transport_address=b"\xff\x00",
        geometry={"dtype": "f32"},
        lease_s=0.5,
    )
    asked = BlockRange(kept="kv", layers=(0, 3), block_size=16, start=1, end=2**31)
    question = DigestsQuestion(engine_id="p", request_id="r", generation=9, ranges=(asked, asked))
    assert convert.from_pb(convert.to_pb(info, pb.NodeInfo), NodeInfo) == info
    assert convert.from_pb(convert.to_pb(handshake, pb.HandshakeReply), Handshake) == handshake
    assert convert.from_pb(convert.to_pb(question, pb.DigestsRequest), DigestsQuestion) == question


@pytest.mark.parametrize("value", [-1, 2**32])
def test_token_id_that_does_not_fit_is_refused(value: int) -> None:
    request = GenerateRequest(request_id="r", prompt_token_ids=(value,))
    with pytest.raises(InvalidRequestError, match="wire format"):
        bytes_of(request)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -1.0),
        ("top_p", 0.0),
        ("max_tokens", 0),
        ("logprobs", 21),
        ("repetition_penalty", 0.0),
    ],
)
def test_sampling_out_of_bounds_is_refused(field: str, value: float) -> None:
    message = pb.GenerateRequest.FromString(bytes_of(REQUESTS[0]))
    setattr(message.sampling, field, value)
    with pytest.raises(InvalidRequestError):
        convert.request_from_pb(message)


def test_request_without_a_label_is_refused() -> None:
    message = pb.GenerateRequest.FromString(bytes_of(REQUESTS[0]))
    message.request_id = ""
    with pytest.raises(InvalidRequestError, match="request_id"):
        convert.request_from_pb(message)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04pickle",
        b"[]",
        b'{"do_remote_prefill": 1}',
        b'{"remote_port": 70000}',
        b'{"tp_size": 8}',
        b'{"remote_block_ids": [[-1]]}',
        b'{"surprise": true}',
        b'{"remote_host": "' + b"h" * 300 + b'"}',
        b"{" + b" " * MAX_KV_TRANSFER_PARAMS_BYTES + b"}",
    ],
)
def test_hostile_transfer_params_are_refused(data: bytes) -> None:
    message = pb.GenerateRequest.FromString(bytes_of(REQUESTS[0]))
    message.kv_transfer_params = data
    with pytest.raises(KVTransferParamsError):
        convert.request_from_pb(message)


def test_unknown_finish_reason_is_an_error() -> None:
    with pytest.raises(TandemError, match="finish_reason"):
        convert.output_from_pb(pb.GenerateOutput(finish_reason="tired"))


@pytest.mark.parametrize("name", ["prompt_token_ids", "stop_token_ids"])
def test_millions_of_tokens_are_refused_by_their_number(name: str) -> None:
    message = pb.GenerateRequest.FromString(bytes_of(REQUESTS[0]))
    place = message if name == "prompt_token_ids" else message.sampling
    getattr(place, name).extend([7] * 30_000_000)
    before = time.process_time()
    with pytest.raises(InvalidRequestError, match=f"{name} has 300*. tokens"):
        convert.request_from_pb(message)
    assert time.process_time() - before < 0.1
