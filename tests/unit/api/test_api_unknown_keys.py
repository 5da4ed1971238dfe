"""Keys that no request has: ignored with one warning each, or refused by a strict server."""

import typing
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.errors import InvalidRequestError
from serving.api import json_body
from serving.api.json_body import MAX_WARNINGS, UnknownKeyWarnings, lenient
from serving.api.messages.request import MessagesRequest
from serving.api.plan import plan_chat, plan_completion
from serving.api.responses.request import ResponsesRequest
from serving.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    TokenizeRequest,
)
from serving.api.served_model import ServedModel
from tests.support.api.api_double import tiny_serving

PART = {"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}
CALL = {"id": "c", "caller": 1, "function": {"name": "f", "arguments": "{}", "score": 1}}
TOOL = {"type": "function", "eager": True, "function": {"name": "f", "returns": {}}}
NESTED: list[dict[str, Any]] = [
    {"messages": [{"role": "user", "content": "x", "thinking": "..."}]},
    {"messages": [{"role": "user", "content": [PART]}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [CALL]}]},
    {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]},
    {"messages": [{"role": "user", "content": "x"}], "stream": True, "stream_options": {"x": 1}},
    {"messages": [{"role": "user", "content": "x"}], "top_pp": 0.5},
]


@pytest.fixture(autouse=True)
def fresh_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a start: nothing has been warned of."""
    monkeypatch.setattr(json_body, "warnings", UnknownKeyWarnings())


@pytest.mark.parametrize("body", NESTED, ids=str)
def test_unknown_keys_at_any_depth_are_ignored_or_refused(
    served: ServedModel, body: dict[str, Any]
) -> None:
    encoded = msgspec.json.encode(body)
    assert plan_chat(encoded, served).requests
    strict = tiny_serving(served.tokenizer, strict_api=True)
    with pytest.raises(InvalidRequestError, match="unknown parameter"):
        plan_chat(encoded, strict)


def test_the_prompt_is_that_without_the_key(served: ServedModel) -> None:
    known = {"role": "user", "content": [{"type": "text", "text": "hello"}]}
    plans = [
        plan_chat(msgspec.json.encode({"messages": [{**known, **more}]}), served)
        for more in ({}, {"content": [PART], "thinking": 1})
    ]
    assert plans[0].prompt_of(0) == plans[1].prompt_of(0)


def test_each_key_is_logged_once_and_keys_without_end_are_not(served: ServedModel) -> None:
    body = msgspec.json.encode({"prompt": [1], "top_pp": 0.5, "n_best": 2, "\x1b[2J": 1})
    with capture_logs() as logs:
        for _ in range(3):
            plan_completion(body, served)
    assert [line["key"] for line in logs] == [r"\x1b[2J", "n_best", "top_pp"]
    many = {f"key{index}": 1 for index in range(2 * MAX_WARNINGS)}
    with capture_logs() as logs:
        plan_completion(msgspec.json.encode({"prompt": [1], **many}), served)
    assert len(logs) == MAX_WARNINGS - 3


def test_wrong_values_and_keys_that_ask_for_something_are_refused_all_the_same(
    served: ServedModel,
) -> None:
    for wrong in ({"suffix": "x"}, {"n": "two"}, {"max_tokens": 0}):
        with pytest.raises(InvalidRequestError, match=next(iter(wrong))):
            plan_completion(msgspec.json.encode({"bogus": 1, "prompt": [1], **wrong}), served)
    with pytest.raises(InvalidRequestError, match="nested deeper"):
        plan_completion(b'{"prompt":[1],"bogus":' + b"[" * 200_000, served)


def test_every_kind_of_request_has_a_lenient_type_that_is_one_of_its_kind() -> None:
    for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest, Message):
        loose = lenient(kind)
        assert issubclass(loose, kind)
        assert forbidding(loose) == set()


@pytest.mark.parametrize("kind", (ChatRequest, ResponsesRequest, MessagesRequest, TokenizeRequest))
def test_a_lenient_type_requires_no_more_keys(kind: Any) -> None:
    """Python makes equal types anew once its cache of them has overflowed."""
    for clear in typing._cleanups:  # type: ignore[attr-defined]
        clear()
    lenient.cache_clear()
    assert required_keys(lenient(kind)) == required_keys(kind)


def forbidding(kind: Any) -> set[str]:
    """Names of the structs in a type that refuse unknown keys."""
    return {it.cls.__name__ for it in structs_in(kind) if it.forbid_unknown_fields}


def required_keys(kind: Any) -> set[tuple[str, str]]:
    """The struct and name of each key in a type that must be there."""
    named = ((it.cls.__name__, field) for it in structs_in(kind) for field in it.fields)
    return {(name, field.name) for name, field in named if field.required}


def structs_in(kind: Any) -> Iterator[msgspec.inspect.StructType]:
    """A type, if it is a struct, and all structs in it, however deep."""
    open_types = [msgspec.inspect.type_info(kind)]
    while open_types:
        it = open_types.pop()
        if isinstance(it, msgspec.inspect.StructType):
            yield it
            open_types += [field.type for field in it.fields]
        open_types += getattr(it, "types", ())
        open_types += [it.item_type] if isinstance(it, msgspec.inspect.ListType) else []
