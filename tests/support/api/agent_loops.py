"""Agents' loops: a framework thinks, calls a tool and answers, each in its own way.

Each is the framework's own, in the protocol that it speaks by default. Imports take seconds.
"""

import json
import os
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the network while imported

import agents
import anthropic
import litellm
import openai
import pydantic_ai
from agents.mcp import MCPServerStdio
from anthropic.types import MessageParam, ToolParam, ToolResultBlockParam
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool as langchain_tool
from langchain_openai import ChatOpenAI
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam
from openai.types.responses import FunctionToolParam, ResponseInputItemParam
from pydantic import SecretStr
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.support.api.grammar_relay import RESULT

ASKED = "How is the weather?"
KEY = "none"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


@dataclass(slots=True)
class Loop:
    """Whatever a loop has shown: thoughts as far as its framework shows them, calls, the answer."""

    thoughts: list[str]
    cities: list[str]
    answer: str = ""

    def weather(self, city: str) -> str:
        """Do what the model asked for."""
        self.cities.append(city)
        return f"{RESULT} in {city}"


async def openai_chat(url: str, loop: Loop) -> None:
    """The official client, streaming; its own reply objects go back as the history."""
    tools: list[ChatCompletionToolParam] = [
        {"type": "function", "function": {"name": "weather", "parameters": dict(SCHEMA)}}
    ]
    turns: list[ChatCompletionMessageParam] = [{"role": "user", "content": ASKED}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        while not loop.answer:
            async with client.chat.completions.stream(
                model="tiny", messages=turns, tools=tools
            ) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            loop.thoughts.append(message.to_dict()["reasoning"])  # type: ignore[arg-type]
            turns.append(message.to_dict())  # type: ignore[arg-type]
            for call in message.tool_calls or ():
                result = loop.weather(**json.loads(call.function.arguments))
                turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
            loop.answer = message.content or ""


async def openai_responses(url: str, loop: Loop) -> None:
    """The official client with items, whole."""
    tools: list[FunctionToolParam] = [
        {"type": "function", "name": "weather", "parameters": dict(SCHEMA), "strict": False}
    ]
    items: list[ResponseInputItemParam] = [{"role": "user", "content": ASKED}]
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        while not loop.answer:
            reply = await client.responses.create(model="tiny", input=items, tools=tools)
            items += reply.output  # type: ignore[arg-type]
            for item in reply.output:
                if item.type == "reasoning":
                    loop.thoughts += [part.text for part in item.content or ()]
                elif item.type == "function_call":
                    result = loop.weather(**json.loads(item.arguments))
                    items.append(
                        {"type": "function_call_output", "call_id": item.call_id, "output": result}
                    )
            loop.answer = reply.output_text


async def anthropic_messages(url: str, loop: Loop) -> None:
    """The official client of the other protocol, streaming."""
    tools: list[ToolParam] = [{"name": "weather", "input_schema": dict(SCHEMA)}]
    turns: list[MessageParam] = [{"role": "user", "content": ASKED}]
    async with anthropic.AsyncAnthropic(base_url=url, api_key=KEY) as client:
        while not loop.answer:
            async with client.messages.stream(
                model="tiny", max_tokens=200, messages=turns, tools=tools
            ) as stream:
                message = await stream.get_final_message()
            turns.append({"role": "assistant", "content": message.content})
            for block in message.content:
                if block.type == "thinking":
                    loop.thoughts.append(block.thinking)
                elif block.type == "tool_use":
                    result = loop.weather(**block.input)  # type: ignore[arg-type]
                    returned: ToolResultBlockParam = {
                        "type": "tool_result",
                        "tool_use_id": block.id,
                        "content": result,
                    }
                    turns.append({"role": "user", "content": [returned]})
                elif block.type == "text":
                    loop.answer += block.text


async def litellm_chat(url: str, loop: Loop) -> None:
    """litellm's SDK, by its name for servers like this one."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
    turns: list[Any] = [{"role": "user", "content": ASKED}]
    while not loop.answer:
        reply = await litellm.acompletion(
            "hosted_vllm/tiny",
            turns,
            tools=tools,
            api_base=f"{url}/v1",
            api_key=KEY,
            reasoning_effort="low",
        )
        message = reply.choices[0].message
        loop.thoughts.append(message.reasoning_content)
        turns.append(message)
        for call in message.tool_calls or ():
            result = loop.weather(**json.loads(call.function.arguments))
            turns.append({"role": "tool", "tool_call_id": call.id, "content": result})
        loop.answer = message.content or ""


async def langchain(url: str, loop: Loop) -> None:
    """LangChain's chat model, as a chat."""
    await _langchain(url, loop, use_responses_api=False)


async def langchain_responses(url: str, loop: Loop) -> None:
    """LangChain's chat model, as responses."""
    await _langchain(url, loop, use_responses_api=True)


async def _langchain(url: str, loop: Loop, *, use_responses_api: bool) -> None:
    weather = langchain_tool("weather", description="The weather of a city now.")(loop.weather)
    model = ChatOpenAI(
        model="tiny",
        base_url=f"{url}/v1",
        api_key=SecretStr(KEY),
        use_responses_api=use_responses_api,
    ).bind_tools([weather])
    turns: list[Any] = [HumanMessage(ASKED)]
    while not loop.answer:
        message = await model.ainvoke(turns)
        turns.append(message)
        for call in message.tool_calls:
            turns.append(await weather.ainvoke(call))
        loop.answer = message.text


async def openai_agents(url: str, loop: Loop) -> None:
    """OpenAI's agents with their default model class, which speaks responses, streaming."""
    tool = agents.function_tool(loop.weather, name_override="weather")
    await _run_agent(url, loop, agents.Agent("asker", tools=[tool]))


async def openai_agents_with_mcp(url: str, loop: Loop) -> None:
    """The same agents with an MCP server's tool, in a process of its own."""
    command: Any = {"command": sys.executable, "args": ["-m", "tests.support.api.mcp_weather"]}
    async with MCPServerStdio(command, client_session_timeout_seconds=60) as server:
        await _run_agent(url, loop, agents.Agent("asker", mcp_servers=[server]))


async def _run_agent(url: str, loop: Loop, agent: agents.Agent[Any]) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        provider = agents.OpenAIProvider(openai_client=client)
        config = agents.RunConfig(model_provider=provider, model="tiny", tracing_disabled=True)
        run = agents.Runner.run_streamed(agent, ASKED, run_config=config, max_turns=3)
        async for _ in run.stream_events():
            pass
    for item in run.new_items:
        if item.type == "tool_call_item" and agent.mcp_servers:
            loop.cities.append(json.loads(item.raw_item.arguments)["city"])  # type: ignore[union-attr]
        elif item.type == "reasoning_item":
            loop.thoughts += [part.text for part in item.raw_item.content or ()]
    loop.answer = run.final_output


async def pydantic_ai_agent(url: str, loop: Loop) -> None:
    """Pydantic AI's agent with its chat model."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        model = OpenAIChatModel("tiny", provider=OpenAIProvider(openai_client=client))
        tool = pydantic_ai.Tool(loop.weather, name="weather")
        run = await pydantic_ai.Agent(model, tools=[tool]).run(ASKED)
    for message in run.all_messages():
        loop.thoughts += [it.content for it in message.parts if it.part_kind == "thinking"]
    loop.answer = run.output


SHOWS_NO_THOUGHTS = ("langchain", "langchain_responses")
LOOPS: tuple[Callable[[str, Loop], Awaitable[None]], ...] = (
    openai_chat,
    openai_responses,
    anthropic_messages,
    litellm_chat,
    langchain,
    langchain_responses,
    openai_agents,
    openai_agents_with_mcp,
    pydantic_ai_agent,
)
