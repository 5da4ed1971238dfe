"""POST /v1/responses as the real openai client sends and reads it, whole and streamed."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from engine.errors import InvalidRequestError
from engine.types import FinishReason
from serving.api.json_body import decode_body
from serving.api.reasoning import SYNTAXES as THOUGHTS
from serving.api.responses.request import ResponsesRequest, chat_of
from serving.api.schema import offer
from serving.api.served_model import ServedModel
from serving.api.tool_syntaxes import SYNTAXES
from tests.support.api.api_double import ScriptedGenerator, running, script_of
from tests.support.api.node_double import client_of

pytestmark = pytest.mark.asyncio
SERVING = {"tool_calls": SYNTAXES["hermes"], "max_model_len": 4096}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOL: Any = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
HISTORY: list[Any] = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    },
    {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c1", "output": "sunny"},
]


async def test_a_whole_response_has_the_client_s_types(served: ServedModel) -> None:
    generator = ScriptedGenerator(script_of(served, f"Wait.\n{CALL}"))
    async with running(generator, served) as base, client_of(base) as client:
        reply = await client.responses.create(
            model="tiny",
            input=HISTORY,
            tools=[TOOL],
            instructions="hello",
            store=True,
            metadata={"a": "b"},
            extra_headers={"X-Request-Id": "mine"},
        )
    assert (reply.id, reply.status, reply.output_text) == ("resp_mine", "completed", "Wait.\n")
    call: Any = reply.output[1]
    assert (call.type, call.name, json.loads(call.arguments)) == (
        "function_call",
        "weather",
        {"city": "Rome"},
    )
    tool: Any = reply.tools[0]
    assert call.call_id and reply.metadata == {"a": "b"} and tool.name == "weather"
    assert reply.usage is not None and reply.usage.input_tokens_details.cached_tokens == 3
    assert reply.model_extra is not None and reply.model_extra["store"] is False


@pytest.mark.parametrize(
    "text",
    [f"Wait.\n{CALL}", "", f"<think>hm,\n\nso</think>\n\nfox{CALL}{CALL}", "<think>endless", CALL],
)
async def test_a_stream_says_what_the_whole_response_says(served: ServedModel, text: str) -> None:
    served = replace(served, thoughts=THOUGHTS["qwen3"])
    # Tokens of calls have log-probabilities too; a stream has closed the message by then.
    top = None if CALL in text else 1
    asked: Any = {"model": "tiny", "input": "hello", "tools": [TOOL], "top_logprobs": top}
    generator = ScriptedGenerator(script_of(served, text))
    async with running(generator, served) as base, client_of(base) as client:
        whole = await client.responses.create(**asked)
        async with client.responses.stream(**asked) as stream:
            events: list[Any] = [event async for event in stream]
            final = await stream.get_final_response()
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert without_ids(final.output) == without_ids(whole.output) and final.usage == whole.usage
    for kind in ("output_text", "reasoning_text"):
        deltas = [it.delta for it in events if it.type == f"response.{kind}.delta"]
        said = [part.text for it in final.output for part in getattr(it, "content", None) or ()]
        assert "".join(deltas) in said or not deltas
        assert kinds.count(f"response.{kind}.done") <= 1


def without_ids(items: Any) -> list[dict[str, Any]]:
    ids = ("id", "call_id", "parsed", "parsed_arguments")
    dumped = [item.to_dict() for item in items]
    for item in dumped:
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return [{key: it for key, it in item.items() if key not in ids} for item in dumped]


async def test_an_answer_that_is_cut_off_is_incomplete(served: ServedModel) -> None:
    script = script_of(served, "hello", finish_reason=FinishReason.LENGTH)
    async with running(ScriptedGenerator(script), served) as base, client_of(base) as client:
        reply = await client.responses.create(model="tiny", input="x", max_output_tokens=9)
    assert reply.status == "incomplete" and reply.incomplete_details is not None
    assert reply.incomplete_details.reason == "max_output_tokens"


def chat(**body: Any) -> Any:
    text = json.dumps({"model": "tiny", **body}).encode()
    return chat_of(decode_body(text, ResponsesRequest, 4096, strict=False))


async def test_items_become_turns() -> None:
    made = chat(input=HISTORY, instructions="be brief")
    roles = [message.role for message in made.messages]
    assert roles == ["system", "user", "assistant", "tool"]
    turn = made.messages[2].for_template()
    assert turn["reasoning_content"] == "hm" and turn["tool_calls"][0]["id"] == "c1"


async def test_choices_among_tools_are_those_of_a_chat() -> None:
    one = {"type": "function", "name": "weather"}
    made = chat(input="x", tools=[TOOL], tool_choice=one)
    assert offer(made.tools, made.tool_choice).must_call == ("weather",)
    some = {"type": "allowed_tools", "mode": "required", "tools": [one]}
    made = chat(input="x", tools=[TOOL, {**TOOL, "name": "other"}], tool_choice=some)
    assert offer(made.tools, made.tool_choice).must_call == ("weather",)
    made = chat(input="x", tools=[TOOL], tool_choice={**some, "tools": [1]})
    with pytest.raises(InvalidRequestError, match="allowed_tools"):
        offer(made.tools, made.tool_choice)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\].*whole history"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "text only"),
        (
            {"input": [{"type": "function_call_output", "call_id": "c", "output": ""}]},
            "call_id='c'",
        ),
        ({"input": "x", "previous_response_id": "resp_1"}, "whole history"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "web_search"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "n": 2}, "n is not told"),
    ],
)
async def test_what_is_not_served_is_named(body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        chat(**body)


async def test_errors_have_the_client_s_classes(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served) as base, client_of(base) as client:
        with pytest.raises(openai.BadRequestError, match="whole history"):
            await client.responses.create(model="tiny", input="x", previous_response_id="r")


async def test_replies_come_back_as_items_as_they_are(served: ServedModel) -> None:
    """Also where unknown keys are refused: the client's own objects have keys of their own."""
    strict = replace(served, strict_api=True, thoughts=THOUGHTS["qwen3"])
    generator = ScriptedGenerator(script_of(served, f"<think>hm\n</think>\n\nfox{CALL}"))
    asked: Any = {"model": "tiny", "tools": [TOOL]}
    async with running(generator, strict) as base, client_of(base) as client:
        reply = await client.responses.create(input="hello", **asked)
        async with client.responses.stream(input="hello", **asked) as stream:
            streamed = await stream.get_final_response()
        for one in (reply, streamed):
            call: Any = one.output[-1]
            result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
            items: Any = [{"role": "user", "content": "hello"}, *one.output, result]
            await client.responses.create(input=items, **asked)
    first, second = (request.prompt_token_ids for request in generator.requests[2:])
    assert first == second and len(first) > len(generator.requests[0].prompt_token_ids) + 3
