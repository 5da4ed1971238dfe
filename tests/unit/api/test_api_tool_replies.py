"""Calls of tools in replies, as the real openai client reads them, whole and streamed."""

import json
from dataclasses import replace
from typing import Any

import openai
import pytest

from engine.types import FinishReason
from serving.api.served_model import ServedModel
from serving.api.tool_syntaxes import SYNTAXES, JsonCalls
from tests.support.api.api_double import ScriptedGenerator, running, script_of
from tests.support.api.node_double import client_of

pytestmark = pytest.mark.asyncio
SERVING = {"tool_calls": SYNTAXES["hermes"], "max_model_len": 4096}
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
TEXT = f"Wait <b>.\n{CALL}\n{CALL}"
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
}


async def ask(served: ServedModel, text: str, **body: Any) -> Any:
    """The one choice of a whole reply, from a model that answers `text`."""
    last = body.pop("last", {})
    generator = ScriptedGenerator(script_of(served, text, **last))
    async with running(generator, served) as base, client_of(base) as client:
        reply = await client.chat.completions.create(**{**ASKED, **body})
    return reply.choices[0]


async def test_calls_are_taken_out_of_the_text(served: ServedModel) -> None:
    choice = await ask(served, TEXT)
    assert (choice.message.content, choice.finish_reason) == ("Wait <b>.\n", "tool_calls")
    calls = choice.message.tool_calls
    assert [call.function.name for call in calls] == ["weather"] * 2
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Rome"}] * 2
    assert len({call.id for call in calls}) == 2
    assert all(call.id.startswith("call_") and call.type == "function" for call in calls)


async def test_a_reply_of_calls_alone_has_no_content(served: ServedModel) -> None:
    choice = await ask(served, f"\n{CALL}")
    assert choice.message.content is None and len(choice.message.tool_calls) == 1
    choice = await ask(served, "hello")
    assert (choice.message.content, choice.message.tool_calls) == ("hello", None)
    assert choice.finish_reason == "stop"


async def test_a_streamed_call_has_the_client_s_parts(served: ServedModel) -> None:
    whole = await ask(served, TEXT)
    generator = ScriptedGenerator(script_of(served, TEXT))
    async with running(generator, served) as base, client_of(base) as client:
        stream = await client.chat.completions.create(**ASKED, stream=True)
        choices = [chunk.choices[0] async for chunk in stream]
    assert "".join(it.delta.content or "" for it in choices) == whole.message.content
    calls = [call for it in choices for call in it.delta.tool_calls or ()]
    assert [call.index for call in calls] == [0, 1]
    told = [call.function.arguments for call in whole.message.tool_calls]
    assert [call.function.arguments for call in calls] == told
    # No chunk without news between the pieces of a call, but for the one that opens the stream.
    assert all(it.delta.content or it.delta.tool_calls for it in choices[1:-1])
    reasons = [it.finish_reason for it in choices]
    assert reasons == [None] * (len(choices) - 1) + ["tool_calls"]


@pytest.mark.parametrize(
    "body", [{"tool_choice": "none"}, {"tools": []}, {"tools": openai.NOT_GIVEN}]
)
async def test_without_offered_tools_the_text_stays_whole(
    served: ServedModel, body: dict[str, Any]
) -> None:
    choice = await ask(served, TEXT, **body)
    assert (choice.message.content, choice.finish_reason) == (TEXT, "stop")
    unread = replace(served, tool_calls=None)
    assert (await ask(unread, TEXT)).message.content == TEXT


async def test_calls_that_may_not_be_parallel_are_one(served: ServedModel) -> None:
    choice = await ask(served, TEXT, parallel_tool_calls=False)
    assert len(choice.message.tool_calls) == 1


async def test_an_answer_that_was_cut_off_says_so(served: ServedModel) -> None:
    choice = await ask(served, CALL + "and", last={"finish_reason": FinishReason.LENGTH})
    assert choice.finish_reason == "length" and len(choice.message.tool_calls) == 1


async def test_markers_that_are_special_tokens_are_seen(served: ServedModel) -> None:
    """The tiny model's own special tokens stand for the markers."""
    syntax = JsonCalls("<|im_start|>", "<|im_end|>")
    marked = CALL.replace("<tool_call>", "<|im_start|>").replace("</tool_call>", "<|im_end|>")
    choice = await ask(replace(served, tool_calls=syntax), marked)
    assert [call.function.name for call in choice.message.tool_calls] == ["weather"]
