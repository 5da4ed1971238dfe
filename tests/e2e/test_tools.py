"""Tool calls of a real model through real servers: a grammar makes the model write the call."""

import json
from pathlib import Path
from typing import Any

import openai

from proxy.config import ProxyConfig
from serving.config import ToolCallParser
from tests.support.api.node_double import client_of, running_proxy, until_status
from tests.support.nodes.asking import ask, question
from tests.support.nodes.cluster import Cluster

CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Rome"}}</tool_call>'
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "weather"}}],
    "extra_body": {"structured_outputs": {"choice": [CALL]}},
}


async def assert_called(client: openai.AsyncOpenAI, *, is_read: bool) -> None:
    """The call is in `tool_calls` where the server reads calls, else it is the text."""
    choice = (await client.chat.completions.create(**ASKED)).choices[0]
    stream = await client.chat.completions.create(**ASKED, stream=True)
    pieces = [chunk.choices[0] async for chunk in stream]
    text = "".join(piece.delta.content or "" for piece in pieces)
    calls = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    if not is_read:
        assert (choice.message.content, choice.finish_reason, text) == (CALL, "stop", CALL)
        return
    assert (choice.message.content, choice.finish_reason, text) == (None, "tool_calls", "")
    assert pieces[-1].finish_reason == "tool_calls"
    for call in (*(choice.message.tool_calls or ()), *calls):
        assert call.function.name == "weather"
        assert json.loads(call.function.arguments) == {"city": "Rome"}
    assert len(calls) == 1


async def assert_forced(client: openai.AsyncOpenAI) -> None:
    """A model of random weights calls the tool, whether calls that it likes to make are read."""
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        body = {**ASKED, "tools": [WEATHER], "tool_choice": choice, "extra_body": {}}
        # Else it may like to call for ever.
        body["parallel_tool_calls"] = False
        forced = await client.chat.completions.create(**body)
        assert forced.choices[0].finish_reason == "tool_calls"
        [call] = forced.choices[0].message.tool_calls or []
        assert call.type == "function" and call.function.name == "weather"
        assert json.loads(call.function.arguments) in ({"city": "Rome"}, {"city": "Oslo"})


async def test_proxy_and_node_read_calls_and_check_keys_as_their_own_options_say(
    cluster: Cluster, checkpoints: dict[str, Path]
) -> None:
    node = await cluster.start(
        "decode",
        checkpoints["qwen3"],
        served_model_name=("tiny",),
        tool_call_parser="hermes",
        strict_api=True,
    )
    parsers: tuple[tuple[ToolCallParser, bool], ...] = (("hermes", True), ("auto", False))
    for parser, is_read in parsers:
        config = ProxyConfig(decode=(node.url,), port=0, tool_call_parser=parser)
        async with running_proxy(config) as base, client_of(base) as client:
            await until_status(f"{base}/ready", 200)
            await assert_called(client, is_read=is_read)
            await assert_forced(client)
            assert (await ask(base, question([5, 6], top_pp=0.5))).status == 200
    async with client_of(node.url) as client:
        await assert_called(client, is_read=True)
    assert (await ask(node.url, question([5, 6], top_pp=0.5))).error(400)["param"] == "top_pp"
