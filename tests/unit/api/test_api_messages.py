"""POST /v1/messages and count_tokens as the real anthropic client sends and reads them."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from engine.errors import InvalidRequestError, OverloadedError
from engine.types import FinishReason
from serving.api.json_body import decode_body
from serving.api.messages.request import MessagesRequest, chat_of
from serving.api.reasoning import SYNTAXES as THOUGHTS
from serving.api.served_model import ServedModel
from serving.api.tool_syntaxes import SYNTAXES
from tests.support.api.api_double import ScriptedGenerator, outputs_of, running, script_of

pytestmark = pytest.mark.asyncio
SERVING = {
    "tool_calls": SYNTAXES["hermes"],
    "thoughts": THOUGHTS["qwen3"],
    "max_model_len": 4096,
}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TOOL: Any = {"name": "weather", "input_schema": {"type": "object"}}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "hello"}],
}
HISTORY: list[Any] = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"},
            {"type": "text", "text": "Wait."},
            {"type": "tool_use", "id": "c1", "name": "weather", "input": {"city": "Rome"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "c1", "content": "sunny"},
            {"type": "text", "text": "and now?", "cache_control": {"type": "ephemeral"}},
        ],
    },
]


@asynccontextmanager
async def asking(
    generator: ScriptedGenerator, served: ServedModel
) -> AsyncIterator[anthropic.AsyncAnthropic]:
    http = anthropic.DefaultAsyncHttpxClient(verify=False)  # loading certificates takes a while
    async with (
        running(generator, served) as base,
        anthropic.AsyncAnthropic(
            base_url=base, api_key="any", max_retries=0, http_client=http
        ) as client,
    ):
        yield client


@pytest.mark.parametrize(
    ("text", "kinds", "reason"),
    [
        (f"Wait.\n{CALL}", ["text", "tool_use"], "tool_use"),
        ("", ["text"], "end_turn"),
        (f"<think>hm\n</think>\n\nfox{CALL}{CALL}", ["thinking", "text", *["tool_use"] * 2], None),
        ("<think>endless", ["thinking"], "end_turn"),
        ("the fox stop here", ["text"], "stop_sequence"),
    ],
)
async def test_a_stream_says_what_the_whole_message_says(
    served: ServedModel, text: str, kinds: list[str], reason: str | None
) -> None:
    asked: dict[str, Any] = {**ASKED, "tools": [TOOL], "stop_sequences": ["stop"]}
    async with asking(ScriptedGenerator(script_of(served, text)), served) as client:
        whole = await client.messages.create(**asked, extra_headers={"X-Request-Id": "mine"})
        async with client.messages.stream(**asked) as stream:
            pieces = [piece async for piece in stream.text_stream]
            final = await stream.get_final_message()
    assert (whole.id, whole.role, whole.type) == ("msg_mine", "assistant", "message")
    assert [block.type for block in whole.content] == kinds
    assert without_ids(final) == without_ids(whole)
    assert whole.stop_reason == (reason or "tool_use")
    assert whole.stop_sequence == ("stop" if reason == "stop_sequence" else None)
    said = [block.text for block in whole.content if block.type == "text"]
    assert "".join(pieces) == "".join(said)
    assert whole.usage.cache_read_input_tokens == 3


def without_ids(message: Any) -> dict[str, Any]:
    dumped: dict[str, Any] = message.to_dict()
    for block in (dumped, *dumped["content"]):
        block.pop("id", None)
        block.pop("parsed_output", None)
    dumped.pop("stop_details", None)
    return dumped


async def test_an_answer_that_is_cut_off_says_so(served: ServedModel) -> None:
    script = script_of(served, "hello", finish_reason=FinishReason.LENGTH)
    async with asking(ScriptedGenerator(script), served) as client:
        assert (await client.messages.create(**ASKED)).stop_reason == "max_tokens"


def chat(**body: Any) -> Any:
    text = json.dumps({**ASKED, **body}).encode()
    return chat_of(decode_body(text, MessagesRequest, 4096, strict=False))


async def test_blocks_become_turns() -> None:
    system = [{"type": "text", "text": text} for text in ("x-anthropic-billing-header: 1", "brief")]
    made = chat(messages=HISTORY, system=system)
    told = [message.for_template() for message in made.messages]
    assert [it["role"] for it in told] == ["system", "user", "assistant", "tool", "user"]
    assert [it["content"] for it in told] == ["brief", "hello", "Wait.", "sunny", "and now?"]
    assert told[2]["reasoning_content"] == "hm"
    (call,) = told[2]["tool_calls"]
    assert call["id"] == told[3]["tool_call_id"] == "c1"
    assert call["function"] == {"name": "weather", "arguments": {"city": "Rome"}}
    assert not made.continue_final_message


async def test_options_become_those_of_a_chat() -> None:
    made = chat(
        tools=[TOOL],
        tool_choice={"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
        thinking={"type": "disabled"},
        output_config={"effort": "low"},
        metadata={"user_id": "me"},
        stop_sequences=["a"],
        messages=[*HISTORY, {"role": "assistant", "content": "It is"}],
    )
    assert made.tool_choice == {"type": "function", "function": {"name": "weather"}}
    assert made.parallel_tool_calls is False and made.stop == ["a"] and made.user == "me"
    assert made.chat_template_kwargs["enable_thinking"] is False
    assert made.reasoning_effort == "low" and made.continue_final_message is True
    assert chat(tools=[TOOL], tool_choice={"type": "any"}).tool_choice == "required"
    schema = {"type": "object", "properties": {}}
    config = {"format": {"type": "json_schema", "schema": schema}}
    assert chat(output_config=config).response_format.json_schema.schema_ == schema


@pytest.mark.parametrize("long", [False, True])
async def test_tokens_are_counted_as_in_the_prompt(served: ServedModel, long: bool) -> None:
    """Also those of a prompt that does not fit: that is what clients ask for."""
    generator = ScriptedGenerator(outputs_of([70]))
    asked: dict[str, Any] = {
        "model": "tiny",
        "messages": HISTORY,
        "system": "x" * (9000 if long else 1),
    }
    async with asking(generator, served) as client:
        counted = await client.messages.count_tokens(**asked)
        if not long:
            await client.messages.create(**asked, max_tokens=1)
        with pytest.raises(anthropic.BadRequestError, match="at most 262144 are taken"):
            await client.messages.count_tokens(**{**asked, "system": "x" * 262_145})
    if long:
        assert counted.input_tokens > served.max_model_len
    else:
        assert counted.input_tokens == len(generator.requests[0].prompt_token_ids)


def with_block(block: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": [block]}]}


@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": None}, "max_tokens"),
        (with_block({"type": "image", "source": {"type": "url"}}), "text only"),
        (with_block({"type": "text"}), r"messages\[0\]\.content\[0\]\.text"),
        (with_block({"type": "tool_result", "tool_use_id": "c"}), "whole history"),
        (with_block({"type": "tool_result", "tool_use_id": "c"}, "assistant"), "tool_result"),
        (with_block({"type": "tool_use", "id": "c", "name": "n"}, "assistant"), "input"),
        (with_block({"type": "thinking", "thinking": "hm"}), "thinking"),
        ({"system": [{"type": "image"}]}, "text only"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "web_search"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"n": 2}, "n is not told"),
    ],
)
async def test_what_is_not_served_is_named(body: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        chat(**body)


async def test_errors_have_the_client_s_classes_and_shape(served: ServedModel) -> None:
    generator = ScriptedGenerator(script_of(served, "hello")[:-1], error=OverloadedError("full"))
    async with asking(generator, served) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**{**ASKED, "max_tokens": 0})
        with pytest.raises(anthropic.NotFoundError):
            await client.messages.count_tokens(model="other", messages=ASKED["messages"])
        with pytest.raises(anthropic.RateLimitError):
            await client.messages.create(**ASKED)
        async with client.messages.stream(**ASKED) as stream:
            with pytest.raises(anthropic.APIStatusError, match="full"):
                await stream.get_final_message()
    body: Any = refused.value.body
    assert body["type"] == "error" and body["error"]["type"] == "invalid_request_error"
    assert refused.value.request_id == body["request_id"]


async def test_models_without_thoughts_say_nothing_of_them(served: ServedModel) -> None:
    plain = replace(served, thoughts=None)
    async with asking(ScriptedGenerator(script_of(served, "<think>")), plain) as client:
        reply = await client.messages.create(**ASKED)
    assert [block.type for block in reply.content] == ["text"]
    assert reply.usage.output_tokens_details is None


async def test_replies_come_back_as_turns_as_they_are(served: ServedModel) -> None:
    """Also where unknown keys are refused: the client's own objects have keys of their own."""
    strict = replace(served, strict_api=True)
    generator = ScriptedGenerator(script_of(served, f"<think>hm\n</think>\n\nfox{CALL}"))
    async with asking(generator, strict) as client:
        reply: Any = await client.messages.create(**ASKED, tools=[TOOL])
        async with client.messages.stream(**ASKED, tools=[TOOL]) as stream:
            streamed: Any = await stream.get_final_message()
        for one in (reply, streamed):
            result = {"type": "tool_result", "tool_use_id": one.content[-1].id, "content": "sunny"}
            turns: Any = [
                *ASKED["messages"],
                {"role": "assistant", "content": one.content},
                {"role": "user", "content": [result]},
            ]
            await client.messages.create(**{**ASKED, "messages": turns}, tools=[TOOL])
    first, second = (request.prompt_token_ids for request in generator.requests[2:])
    assert first == second and len(first) > len(generator.requests[0].prompt_token_ids) + 3
