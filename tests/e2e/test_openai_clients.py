"""The official clients of OpenAI and Anthropic, and curl, through a real proxy to real nodes."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import anthropic
import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.support.api.node_double import client_of
from tests.support.nodes.asking import question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import API_KEY, ServedCluster, ServerProcess

PROMPT = list(prompt_of(70, salt=9))
GREEDY: dict[str, Any] = {"model": "tiny", "max_tokens": 12, "temperature": 0}
IDS: dict[str, Any] = {"return_token_ids": True, "ignore_eos": True}
CHAT: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "hello"},
    {"role": "user", "content": "stop here now"},
]
PULLS = "vllm:nixl_bytes_transferred_count"
RUNNING = "vllm:num_requests_running"


@pytest.fixture
async def client(served: ServedCluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with client_of(served.proxy.url, API_KEY) as made:
        yield made


def ids_of(choice: Any) -> list[int]:
    return list(choice.model_extra.get("token_ids") or ())


async def test_models_are_listed_and_described(
    served: ServedCluster, client: openai.AsyncOpenAI
) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    # Benchmarks load the tokenizer of `root`, which the proxy has from its nodes.
    for url in (served.proxy.url, served.d.url):
        async with client_of(url, API_KEY) as asking:
            card = await asking.models.retrieve("tiny")
        assert (card.id, card.to_dict()["root"]) == ("tiny", str(served.model))
    with pytest.raises(openai.NotFoundError):
        await client.models.retrieve("other")


@pytest.mark.parametrize("server", ["proxy", "p", "d"])
async def test_all_protocols_say_what_a_chat_says(
    served: ServedCluster, client: openai.AsyncOpenAI, server: str
) -> None:
    said = (await client.chat.completions.create(messages=CHAT, **GREEDY)).choices[0].message
    url = getattr(served, server).url
    items: Any = CHAT
    async with client_of(url, API_KEY) as other:
        response = await other.responses.create(
            input=items, model="tiny", max_output_tokens=12, temperature=0
        )
    assert response.output_text == said.content
    system, user = (str(turn["content"]) for turn in CHAT)
    asked: Any = {
        "model": "tiny",
        "system": system,
        "messages": [{"role": "user", "content": user}],
    }
    http = anthropic.DefaultAsyncHttpxClient(verify=False)
    async with (
        anthropic.AsyncAnthropic(base_url=url, api_key=API_KEY, http_client=http) as agent,
        agent.messages.stream(**asked, max_tokens=12, extra_body={"temperature": 0}) as stream,
    ):
        message: Any = await stream.get_final_message()
        counted = await agent.messages.count_tokens(**asked)
    assert message.content[0].text == said.content and message.stop_reason == "max_tokens"
    cached = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + cached == counted.input_tokens


async def test_several_choices_and_prompts_are_handed_over_each(
    served: ServedCluster, client: openai.AsyncOpenAI
) -> None:
    pulls = served.d.metrics()[PULLS]
    sampled = {**GREEDY, "temperature": 1.0, "seed": 4}
    prompts = [PROMPT, PROMPT[:30]]
    first = await client.completions.create(prompt=prompts, n=2, **sampled, extra_body=IDS)
    again = await client.completions.create(prompt=prompts, n=2, **sampled, extra_body=IDS)
    tokens = [tuple(ids_of(choice)) for choice in first.choices]
    assert [tuple(ids_of(choice)) for choice in again.choices] == tokens
    assert len(set(tokens)) == 4
    assert served.d.metrics()[PULLS] == pulls + 8


@pytest.mark.parametrize("path", ["completions", "chat"])
async def test_a_client_that_leaves_cancels_on_every_node(
    served: ServedCluster, client: openai.AsyncOpenAI, path: str
) -> None:
    for _ in range(3):
        stream: Any
        if path == "chat":
            stream = await client.chat.completions.create(
                messages=CHAT, model="tiny", max_tokens=300, stream=True, extra_body=IDS
            )
        else:
            stream = await client.completions.create(
                prompt=PROMPT, model="tiny", max_tokens=300, stream=True, extra_body=IDS
            )
        await anext(aiter(stream))
        await stream.close()
    for node in (served.p, served.d):
        await asyncio.to_thread(node.wait_for, RUNNING, 0)
        await asyncio.to_thread(node.wait_for, "tandem:held_requests", 0)


@pytest.mark.parametrize("node", ["p", "d"])
async def test_a_client_that_leaves_before_the_answer_cancels_too(
    served: ServedCluster, client: openai.AsyncOpenAI, node: str
) -> None:
    """Whatever was under way on either node: nothing there outlives the client, no lease either."""
    generated = "vllm:generation_tokens_total"
    worker: ServerProcess = getattr(served, node)
    for _ in range(5):
        before = worker.metrics()[generated]
        asked = [asyncio.create_task(long_completion(client)) for _ in range(3)]
        while worker.metrics()[generated] == before:  # noqa: ASYNC110 - another process counts
            await asyncio.sleep(0)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    await asyncio.to_thread(served.d.wait_for, RUNNING, 0)


async def long_completion(client: openai.AsyncOpenAI) -> None:
    await client.completions.create(prompt=PROMPT, model="tiny", max_tokens=300, extra_body=IDS)


async def curl(*arguments: str) -> tuple[int, str]:
    """Status and body of what curl got."""
    process = await asyncio.create_subprocess_exec(
        *("curl", "--silent", "--show-error", "--max-time", "60", "--write-out", "\n%{http_code}"),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    assert process.returncode == 0
    body, _, status = out.decode().rpartition("\n")
    return int(status), body


async def test_curl_gets_whole_and_streamed_answers(served: ServedCluster) -> None:
    post = ["-H", f"Authorization: Bearer {API_KEY}", "-H", "Content-Type: application/json"]
    url = served.proxy.url
    whole = await curl(f"{url}/v1/completions", *post, "-d", json.dumps(question(PROMPT)))
    assert whole[0] == 200
    body = json.dumps(question(PROMPT, stream=True))
    status, text = await curl(f"{url}/v1/completions", *post, "-N", "-d", body)
    events = text.strip().split("\n\n")
    assert (status, events[-1]) == (200, "data: [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-1]]
    ids = [token for chunk in chunks for token in chunk["choices"][0]["token_ids"]]
    assert ids == json.loads(whole[1])["choices"][0]["token_ids"]
    assert (await curl(f"{url}/v1/models"))[0] == 401
    assert (await curl(f"{url}/v1/models", *post[:2]))[0] == 200
    assert (await curl(f"{url}/health"))[0] == 200
