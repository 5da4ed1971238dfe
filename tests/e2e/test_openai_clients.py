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
from tests.support.nodes.asking import ask, question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import API_KEY, ServedCluster, ServerProcess

PROMPT = list(prompt_of(70, salt=9))
TEXT = "the quick brown fox jumps"
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


def counts_of(usage: openai.types.CompletionUsage | None) -> tuple[int, int, int | None]:
    """Tokens of the prompt, of the answer, and cached; the total must be their sum."""
    assert usage is not None and usage.prompt_tokens_details is not None
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    cached = usage.prompt_tokens_details.cached_tokens
    return usage.prompt_tokens, usage.completion_tokens, cached


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


async def test_a_completion_is_that_of_one_node_and_was_pulled(
    served: ServedCluster, client: openai.AsyncOpenAI
) -> None:
    pulls = served.d.metrics()[PULLS]
    reply = await client.completions.create(prompt=PROMPT, **GREEDY, extra_body=IDS)
    assert served.d.metrics()[PULLS] == pulls + 1
    alone = await ask(served.d.url, question(PROMPT, max_tokens=12))
    assert ids_of(reply.choices[0]) == alone.token_ids
    assert reply.choices[0].text == alone.body["choices"][0]["text"]
    assert reply.choices[0].finish_reason == "length"
    assert counts_of(reply.usage) == (70, 12, 0)


async def test_a_streamed_completion_has_the_same_tokens_text_and_usage(
    client: openai.AsyncOpenAI,
) -> None:
    whole = await client.completions.create(prompt=TEXT, **GREEDY, logprobs=2, extra_body=IDS)
    stream = await client.completions.create(
        prompt=TEXT,
        **GREEDY,
        logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IDS,
    )
    chunks = [chunk async for chunk in stream]
    choices = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [token for choice in choices for token in ids_of(choice)] == ids_of(whole.choices[0])
    assert "".join(choice.text for choice in choices) == whole.choices[0].text
    expected = whole.choices[0].logprobs
    assert expected is not None
    found = [value for c in choices if c.logprobs for value in c.logprobs.token_logprobs or ()]
    assert found == expected.token_logprobs
    assert counts_of(chunks[-1].usage) == counts_of(whole.usage)
    assert [choice.finish_reason for choice in choices][-1] == "length"


async def test_a_chat_is_the_same_streamed_or_not(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(messages=CHAT, **GREEDY, extra_body=IDS)
    message = whole.choices[0].message
    assert message.role == "assistant" and message.content
    stream = await client.chat.completions.create(
        messages=CHAT,
        **GREEDY,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IDS,
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert counts_of(chunks[-1].usage) == counts_of(whole.usage)
    assert counts_of(whole.usage)[1:] == (12, 0)


async def test_a_turn_with_calls_and_results_goes_through_the_proxy(
    client: openai.AsyncOpenAI,
) -> None:
    """The tiny model calls nothing; what it reads of tools is the template's affair."""
    call: Any = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    turns: list[ChatCompletionMessageParam] = [
        *CHAT,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]
    tools: list[Any] = [{"type": "function", "function": {"name": "f"}}]
    asked: dict[str, Any] = {**GREEDY, "messages": turns, "tools": tools, "extra_body": IDS}
    whole = await client.chat.completions.create(**asked)
    plain = await client.chat.completions.create(messages=CHAT, **GREEDY)
    assert counts_of(whole.usage)[0] > counts_of(plain.usage)[0] + 10
    stream = await client.chat.completions.create(**asked, stream=True)
    text = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert text == whole.choices[0].message.content


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


async def test_errors_have_the_clients_own_classes(served: ServedCluster) -> None:
    async with client_of(served.proxy.url, API_KEY) as client:
        with pytest.raises(openai.BadRequestError, match="token id 512"):
            await client.completions.create(prompt=[512], **GREEDY)
        with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served"):
            await client.completions.create(prompt=[5], **{**GREEDY, "model": "gpt-4"})
    async with client_of(served.proxy.url, "wrong") as client:
        with pytest.raises(openai.AuthenticationError):
            await client.completions.create(prompt=[5], **GREEDY)


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
