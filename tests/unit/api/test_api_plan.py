"""From a JSON body to GenerateRequests: what is accepted, what is refused and how it is named."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequestError, KVTransferParamsError, UnknownModelError
from serving.api.json_body import MAX_OBJECTS, decode_body, decode_kv_transfer_params
from serving.api.messages.request import MessagesRequest
from serving.api.plan import Plan, plan_chat, plan_completion
from serving.api.responses.request import ResponsesRequest
from serving.api.schema import ChatRequest, CompletionRequest
from serving.api.served_model import SamplingDefaults, ServedModel
from serving.api.tokenizer import Tokenizer
from tests.support.api.api_double import tiny_serving

SERVING = {"strict_api": True}
PROXY_PARAMS = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
PREFILL_REPLY = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_engine_id": "p0-ab",
    "remote_request_id": "cmpl-1",
    "remote_block_ids": [[1, 2], [7]],
    "remote_host": "127.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 3,
    "tp_size": 1,
    "first_token_ids": [9],
    "first_token_logprobs": None,
    "remote_num_cached_tokens": 0,
    "signature": "00ff",
}
TURN = [{"role": "user", "content": "hello"}]


OVERFLOW = "^This model's maximum context length is 256 tokens"


def complete(served: ServedModel, **body: Any) -> Plan:
    encoded = msgspec.json.encode({"prompt": [1, 2, 3], **body})
    return plan_completion(encoded, replace(served, accept_kv_transfer_params=True))


def chat(served: ServedModel, **body: Any) -> Plan:
    encoded = msgspec.json.encode({"messages": TURN, **body})
    return plan_chat(encoded, served)


def test_every_sampling_value_arrives(served: ServedModel) -> None:
    values = {
        "max_tokens": 9,
        "min_tokens": 2,
        "temperature": 0,
        "top_p": 0.5,
        "top_k": 7,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "repetition_penalty": 1.5,
        "seed": -5,
        "stop_token_ids": [4],
        "ignore_eos": True,
        "logprobs": 2,
    }
    sampling = complete(served, **values).requests[0].sampling
    expected = {**values, "stop_token_ids": (4,)}
    assert {name: getattr(sampling, name) for name in values} == expected


def test_salt_and_priority_travel_and_client_ids_do_not(served: ServedModel) -> None:
    request = complete(served, cache_salt="../a\u00e9", priority=-3, request_id="x").requests[0]
    assert (request.cache_salt, request.priority) == ("../a\u00e9", -3)
    assert request.request_id.startswith("cmpl-") and "x" not in request.request_id


def test_defaults_of_the_model_are_used_where_the_request_is_silent(served: ServedModel) -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20)
    silent = tiny_serving(served.tokenizer, defaults=defaults)
    sampling = complete(silent, temperature=1.5).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.5, 20, 1.0)


def test_absent_seed_is_drawn_anew_and_choices_count_up(served: ServedModel) -> None:
    first, second = (complete(served).requests[0].sampling.seed for _ in range(2))
    assert first != second
    plan = complete(served, prompt=[[1], [2, 3]], n=2, seed=2**63 - 1)
    assert [r.sampling.seed for r in plan.requests] == [2**63 - 1, -(2**63)] * 2
    assert [r.prompt_token_ids for r in plan.requests] == [(1,), (1,), (2, 3), (2, 3)]
    assert len({r.request_id for r in plan.requests}) == 4


@pytest.mark.parametrize(
    ("body", "max_tokens"),
    [
        ({}, 16),
        ({"max_tokens": None}, 253),
        ({"max_tokens": 253}, 253),
        ({"max_tokens": 5, "max_completion_tokens": 6}, 6),
        ({"prompt": [1] * 250}, 6),
    ],
)
def test_token_budget_of_completions(
    served: ServedModel, body: dict[str, Any], max_tokens: int
) -> None:
    assert complete(served, **body).requests[0].sampling.max_tokens == max_tokens


def test_chat_fills_the_context_and_renders_parts(served: ServedModel) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    turns = [{"role": "user", "content": parts}]
    plan = chat(served, messages=turns)
    text = served.tokenizer.decode(plan.prompt_of(0), skip_special_tokens=False)
    assert text == "<|im_start|>user\nhel\nlo<|im_end|>\n<|im_start|>assistant\n"
    assert plan.requests[0].sampling.max_tokens == 256 - len(plan.prompt_of(0))


def test_chat_default_comes_from_generation_config_and_is_cut(served: ServedModel) -> None:
    limited = tiny_serving(served.tokenizer, defaults=SamplingDefaults(max_new_tokens=4))
    assert chat(limited).requests[0].sampling.max_tokens == 4
    generous = tiny_serving(served.tokenizer, defaults=SamplingDefaults(max_new_tokens=9999))
    assert chat(generous).requests[0].sampling.max_tokens < 256


def test_chat_logprobs_are_counted_from_top_logprobs(served: ServedModel) -> None:
    assert chat(served).requests[0].sampling.logprobs is None
    assert chat(served, logprobs=True).requests[0].sampling.logprobs == 0
    assert chat(served, logprobs=True, top_logprobs=3).requests[0].sampling.logprobs == 3


def test_a_reply_of_the_openai_client_can_be_sent_back(served: ServedModel) -> None:
    nulls = dict.fromkeys(("refusal", "annotations", "audio", "function_call", "tool_calls"))
    turns = [*TURN, {"role": "assistant", "content": "ok", **nulls}, *TURN]
    assert len(chat(served, messages=turns).prompt_of(0)) > 0


def test_neutral_values_of_unsupported_keys_and_labels_are_fine(served: ServedModel) -> None:
    neutral: dict[str, Any] = {
        "echo": False,
        "best_of": 1,
        "suffix": None,
        "logit_bias": {},
        "tools": [],
        "response_format": {"type": "text"},
        "user": "u",
        "metadata": {"a": "b"},
        "store": True,
    }
    assert complete(served, **neutral).requests


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": ""}, "prompt", "empty"),
    ({"prompt": []}, "prompt", "empty"),
    ({"prompt": [[1], []]}, "prompt", "empty"),
    ({"prompt": [1, -7]}, "prompt", "-7"),
    ({"prompt": [1, 300]}, "prompt", "300 is outside 0 .. 299"),
    ({"prompt": [1, "a"]}, "prompt", "mixes"),
    ({"prompt": [True]}, "prompt[0]", "bool"),
    ({"prompt": {"a": 1}}, "prompt", "object"),
    ({"prompt": [[1]] * 65}, "prompt", "65"),
    ({"prompt": [[1]] * 64, "n": 64}, "n", "n=64 for 64 prompts makes 4096 sequences"),
    (
        {"prompt": "hello" * 1000},
        "prompt",
        "^This model's maximum context length is 256 .* 5000 characters",
    ),
    ({"prompt": [1] * 256}, "prompt", "^This model's maximum context length is 256 tokens. .* 256"),
    ({"max_tokens": 0}, "max_tokens", "max_tokens=0"),
    ({"max_tokens": -1}, "max_tokens", "max_tokens=-1"),
    ({"max_tokens": 254}, "max_tokens", OVERFLOW + ".*max_tokens=254.* 253"),
    ({"max_tokens": 10**30}, "max_tokens", OVERFLOW),
    ({"max_tokens": "5"}, "max_tokens", "max_tokens='5'"),
    ({"min_tokens": 17}, "min_tokens", "min_tokens=17"),
    ({"min_tokens": -1}, "min_tokens", "min_tokens=-1"),
    ({"temperature": -0.1}, "temperature", "temperature=-0.1"),
    ({"temperature": "hot"}, "temperature", "hot"),
    ({"top_p": 0}, "top_p", "top_p=0"),
    ({"top_p": 1.01}, "top_p", "top_p=1.01"),
    ({"top_k": -2}, "top_k", "top_k=-2"),
    ({"min_p": 2}, "min_p", "min_p=2"),
    ({"presence_penalty": 2.5}, "presence_penalty", "2.5"),
    ({"repetition_penalty": 0}, "repetition_penalty", "0"),
    ({"seed": 2**63}, "seed", "seed"),
    ({"n": 16384}, "n", "n=16384"),
    ({"n": 0}, "n", "n=0"),
    ({"logprobs": 21}, "logprobs", "21"),
    ({"logprobs": True}, "logprobs", "True"),
    ({"stop": ""}, "stop", "stop"),
    ({"stop": ["a"] * 17}, "stop", "16"),
    ({"stop_token_ids": [300]}, "stop_token_ids", "300"),
    ({"cache_salt": ""}, "cache_salt", "cache_salt"),
    ({"cache_salt": "a" * 257}, "cache_salt", "256"),
    ({"cache_salt": 5}, "cache_salt", "5"),
    ({"priority": 2**40}, "priority", "priority"),
    ({"cache_boundaries": [0]}, "cache_boundaries[0]", "0"),
    ({"cache_boundaries": [5, -16]}, "cache_boundaries[1]", ">= 1"),
    ({"cache_boundaries": [16.5]}, "cache_boundaries[0]", "got `float`"),
    ({"cache_boundaries": ["16"]}, "cache_boundaries[0]", "got `str`"),
    ({"cache_boundaries": [True]}, "cache_boundaries[0]", "bool|True"),
    ({"cache_boundaries": [2**70]}, "cache_boundaries[0]", "cache_boundaries"),
    ({"cache_boundaries": 16}, "cache_boundaries", "16"),
    ({"cache_boundaries": list(range(1, 18))}, "cache_boundaries", "16"),
    ({"request_id": "a" * 100_000}, "request_id", "256"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "unknown"),
    ({"bogus": 1}, "bogus", "unknown parameter"),
    ({"echo": True, "max_tokens": -1}, "max_tokens", "max_tokens=-1"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "prompt_logprobs=-1"),
    ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream=true"),
    ({"truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "max_model_len=256"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "=0 leaves no prompt"),
    ({"detokenize": False, "stop": "x"}, "stop", "detokenize"),
    ({"bad_words": [""]}, "bad_words[0]", "bad_words"),
    ({"continue_final_message": True}, "continue_final_message", "not supported"),
    ({"best_of": 2}, "best_of", "best_of=2 with n=1 is not supported"),
    ({"suffix": "x"}, "suffix", "not supported"),
]


@pytest.mark.parametrize(("body", "param", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_wrong_completion_names_key_and_value(
    served: ServedModel, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        complete(served, **body)
    assert caught.value.param == param
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, None),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [1]}]}, None),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"echo": True}, "echo"),
        ({"prompt": "x"}, "prompt"),
    ],
)
def test_wrong_chat_is_refused(
    served: ServedModel, body: dict[str, Any], param: str | None
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        chat(served, **body)
    assert param is None or caught.value.param == param


def test_model_must_be_one_of_the_served(served: ServedModel) -> None:
    assert complete(served, model="tiny-alias").model == "tiny"
    with pytest.raises(UnknownModelError, match="'other'"):
        complete(served, model="other")


def test_body_of_a_sequential_pd_proxy_is_tolerated(served: ServedModel) -> None:
    plan = complete(
        served,
        max_tokens=1,
        max_completion_tokens=90,
        min_tokens=50,
        stream=False,
        stream_options={"include_usage": True},
        stop=["x"],
        kv_transfer_params=PROXY_PARAMS,
    )
    sampling = plan.requests[0].sampling
    assert (sampling.max_tokens, sampling.min_tokens, plan.stop) == (1, 1, ())
    params = plan.requests[0].kv_transfer_params
    assert params is not None and params.do_remote_decode


def test_prefill_reply_is_taken_as_it_is(served: ServedModel) -> None:
    params = complete(served, kv_transfer_params=PREFILL_REPLY).requests[0].kv_transfer_params
    assert params is not None
    assert (params.remote_block_ids, params.first_token_ids) == (((1, 2), (7,)), (9,))


def raw_of(value: object) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(value))


@pytest.mark.parametrize("value", [None, {}, dict.fromkeys(PREFILL_REPLY)])
def test_params_that_ask_for_nothing_are_none(value: object) -> None:
    assert decode_kv_transfer_params(raw_of(value)) is None
    assert decode_kv_transfer_params(msgspec.Raw()) is None


@pytest.mark.parametrize(
    "value",
    [
        "x",
        [],
        {"do_remote_decode": "yes"},
        {**PREFILL_REPLY, "extra": 1},
        {**PREFILL_REPLY, "tp_size": 10**9},
        {**PREFILL_REPLY, "remote_port": 0},
        {**PREFILL_REPLY, "remote_port": "5600"},
        {**PREFILL_REPLY, "remote_block_ids": [[-1]]},
        {**PREFILL_REPLY, "remote_block_ids": [[0] * 262_145]},
        {**PREFILL_REPLY, "remote_num_tokens": 0},
        {**PREFILL_REPLY, "remote_engine_id": ""},
        {**PREFILL_REPLY, "first_token_ids": []},
        {**PREFILL_REPLY, "signature": "a" * 129},
    ],
    ids=lambda v: str(v)[-40:],
)
def test_hostile_params_are_refused(value: object) -> None:
    with pytest.raises(KVTransferParamsError) as caught:
        decode_kv_transfer_params(raw_of(value))
    assert caught.value.param == "kv_transfer_params"


@pytest.mark.parametrize("body", [{"n": 2}, {"prompt": [[1], [2]]}])
def test_params_describe_one_sequence(served: ServedModel, body: dict[str, Any]) -> None:
    with pytest.raises(KVTransferParamsError, match="one sequence"):
        complete(served, kv_transfer_params=PROXY_PARAMS, **body)


def test_without_tokenizer_ids_work_and_text_names_the_file() -> None:
    bare = tiny_serving(Tokenizer())
    assert complete(bare).prompt_of(0) == (1, 2, 3)
    wrong: list[Callable[[], Plan]] = [
        lambda: complete(bare, prompt="hi"),
        lambda: complete(bare, stop="x"),
        lambda: chat(bare),
    ]
    for make in wrong:
        with pytest.raises(InvalidRequestError, match=r"tokenizer\.json"):
            make()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": 1e999}',
        b'{"a": "\xff"}',
        b'{"a": "\\ud800"}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"a": ' + b"[" * 1_000_000,
        b'{"a":' * 100_000,
        b"{%s}" % b",".join(b'"k%d":1' % index for index in range(50_000)),
        b'{"prompt":[%s5]}' % (b"5," * 1_048_576),
        b'{"prompt":[5],"chat_template_kwargs":"%s"}' % (b"x" * 1_100_000),
        b'{"prompt":{"a":%s}}' % (b"[0]" + b" " * 300_000),
    ],
    ids=lambda b: repr(b[:24]),
)
def test_bodies_that_are_no_bounded_json_object(body: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        decode_body(body, CompletionRequest, 4_194_304)


def test_long_lists_are_refused_before_they_are_built() -> None:
    """Several prompts may together be longer than one."""
    one, two = b"5," * 199_999 + b"5", b"[%s]" % (b"5," * 199_999 + b"5")
    both, alone = b'{"prompt":[%s,%s]}' % (two, two), b'{"prompt":[%s]}' % one
    assert len(decode_body(both, CompletionRequest, 200_000).prompt) == 2
    assert len(decode_body(alone, CompletionRequest, 200_000).prompt) == 200_000
    turn = rb'{"role":"user","content":"\"role\" \"role\""}'
    turns = b'{"messages":[%s]}'
    most = turns % b",".join([turn] * 16_384)
    assert len(decode_body(most, ChatRequest, 1).messages) == 16_384
    with pytest.raises(InvalidRequestError, match="length <= 16384"):
        decode_body(turns % b",".join([turn] * 16_385), ChatRequest, 1)
    with pytest.raises(
        InvalidRequestError, match=r"^This model's maximum context length is 199999 tokens"
    ):
        decode_body(b'{"prompt": [%s-%s]}' % (b" " * 100, one), CompletionRequest, 199_999)


ESCAPED = b"".join(b"\\u%04x" % letter for letter in b"type")


def test_the_prompt_logprobs_of_a_reply_are_bounded_together(served: ServedModel) -> None:
    body = {"prompt": [[5] * 255] * 2, "n": 64, "max_tokens": 1}
    assert len(complete(served, **body, prompt_logprobs=20).requests) == 128
    long = replace(served, max_model_len=2049)
    told = "are 262144 tokens, at most 49932"
    with pytest.raises(InvalidRequestError, match=told):
        complete(long, **{**body, "prompt": [[5] * 2048] * 2}, prompt_logprobs=20)
    with pytest.raises(InvalidRequestError, match=told):
        complete(long, **{**body, "prompt": [[5] * 2048] * 2}, logprobs=20, echo=True)


OBJECTS = (
    b'{"type":"text","text":"{"}',
    b'{"%s":"text","text":""}' % ESCAPED,
    b'{ \n"text":""}',
    b'{"function":{"name":"f"}}',
)


@pytest.mark.parametrize("one", OBJECTS, ids=repr)
def test_objects_are_counted_before_they_are_built_however_they_are_spelt(one: bytes) -> None:
    """Braces in texts do not count as objects, but for one at the very end of a text."""
    key = b"tool_calls" if b"function" in one else b"content"
    for name, kind in (("messages", ChatRequest), ("input", ResponsesRequest)):
        many = b",".join([one] * (MAX_OBJECTS + 1))
        body = b'{"%s":[{"role":"assistant","%s":[%s]}]}' % (name.encode(), key, many)
        with pytest.raises(InvalidRequestError, match=f"{name}: more than {MAX_OBJECTS} objects"):
            decode_body(body, kind, 1)
    with pytest.raises(InvalidRequestError, match=f"system: more than {MAX_OBJECTS} objects"):
        decode_body(b'{"system":[%s]}' % many, MessagesRequest, 1)
    code = json.dumps('{ "a": {"b": 1} } ' * MAX_OBJECTS).encode()
    assert decode_body(b'{"messages":[{"role":"user","content":%s}]}' % code, ChatRequest, 1)


@pytest.mark.parametrize("is_cut", [False, True])
def test_texts_are_bounded_before_they_are_tokenized(served: ServedModel, is_cut: bool) -> None:
    """Together, and by less where only their ends count."""
    cut = {"truncate_prompt_tokens": 9, "max_tokens": 1} if is_cut else {}
    most = served.text_limit(must_fit=not is_cut).max_chars
    assert most == (262_144 if is_cut else 4_194_304)
    with pytest.raises(InvalidRequestError, match=f"256 tokens.*{most + 1} characters"):
        complete(served, prompt="a" * (most + 1), **cut)
    with pytest.raises(InvalidRequestError, match=f"{most + 2} characters together.*{most} are"):
        complete(served, prompt=["a" * (most // 2 + 1)] * 2, **cut)


@pytest.mark.parametrize("named", [None, [], [1], [9999, 4, 4], [7] * 16])
def test_cache_boundaries_travel_with_each_sequence(
    served: ServedModel, named: list[int] | None
) -> None:
    """Boundaries past the prompt, or named twice, are accepted: all are hints."""
    plan = complete(served, prompt=[[5], [6]], n=2, cache_boundaries=named)
    assert [it.cache_boundaries for it in plan.requests] == [tuple(named or ())] * 4


def test_unsupported_keys_are_named_in_one_order(served: ServedModel) -> None:
    """However the client orders them, and whatever this process's hashes are."""
    for body in ({"tools": [1], "suffix": "x"}, {"suffix": "x", "tools": [1]}):
        with pytest.raises(InvalidRequestError, match="suffix='x' is not supported"):
            complete(served, **body)


def test_deep_values_are_refused_and_never_break_the_server(served: ServedModel) -> None:
    for depth in (100, 900, 980, 990, 2000, 200_000):
        deep = b"[" * depth + b"]" * depth
        for key in (b"tools", b"bogus", b"kv_transfer_params", b"stop"):
            body = b'{"prompt":[5],"%s":%s}' % (key, deep)
            with pytest.raises(InvalidRequestError):
                plan_completion(body, replace(served, accept_kv_transfer_params=True))
