"""The surface through the real openai client over a real server."""

import json
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest

from engine.errors import (
    DeadlineExceededError,
    EngineDeadError,
    EngineGenerateError,
    KVLoadError,
    OverloadedError,
    TandemError,
    UnavailableError,
)
from engine.types import (
    FinishReason,
    GenerateOutput,
    KVTransferParams,
    KVTransferStats,
    RoutingDetails,
)
from serving.api.served_model import ServedModel
from serving.api.tokenizer import Tokenizer
from tests.support.api.api_double import TEXT, ScriptedGenerator, outputs_of, running, tiny_serving

pytestmark = pytest.mark.asyncio
TURN: list[Any] = [{"role": "user", "content": "hello"}]
STATS = KVTransferStats(attention_bytes=10, state_bytes=4, transfer_ms=1.5)


def client_of(base: str, key: str = "none") -> openai.AsyncOpenAI:
    """A real client; without TLS set-up, which costs more than all the rest of a test."""
    return openai.AsyncOpenAI(
        base_url=f"{base}/v1",
        api_key=key,
        max_retries=0,
        http_client=openai.DefaultAsyncHttpxClient(verify=False, timeout=20),
    )


async def collect(stream: Any) -> list[Any]:
    return [chunk async for chunk in stream]


async def post_lines(base: str, path: str, **body: Any) -> list[str]:
    """Non-empty lines of a reply, as they came over the wire."""
    async with aiohttp.ClientSession() as session, session.post(base + path, json=body) as reply:
        assert reply.status == 200
        return [line for line in (await reply.text()).split("\n") if line]


async def test_completion_in_one_piece(served: ServedModel, ids: tuple[int, ...]) -> None:
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        reply = await client_of(base).completions.create(model="tiny", prompt=[5, 6, 7, 8])
    assert reply.object == "text_completion" and reply.id.startswith("cmpl-")
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (TEXT, "length")
    usage: Any = reply.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (4, len(ids))
    assert usage.total_tokens == 4 + len(ids)
    assert usage.prompt_tokens_details.cached_tokens == 3


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_cached_tokens_are_told_only_where_the_server_is_asked_to(
    served: ServedModel, ids: tuple[int, ...], path: str
) -> None:
    """Bytes of a pull count too: what was here already is not among them."""
    route = RoutingDetails(prefill="p", decode="d", reason="prefix", prefill_hit_tokens=7)
    script = outputs_of(ids, kv_transfer=STATS, routing=route)
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": [5]} if path == "/v1/completions" else {"messages": TURN}
    told = []
    for is_told in (False, True):
        server = tiny_serving(served.tokenizer, enable_prompt_tokens_details=is_told)
        async with running(ScriptedGenerator(script), server) as base:
            whole = await post_lines(base, path, **body)
            parts = await post_lines(base, path, **body, stream=True, stream_options=options)
        lines = [whole[0], *(line.removeprefix("data: ") for line in parts[:-1])]
        usages = [json.loads(line)["usage"] for line in lines]
        assert usages[0]["routing"] == usages[-1]["routing"]
        told.append(json.dumps(usages))
        assert ('"reason": "prefix"' in told[-1]) and ("hit_tokens" in told[-1]) == is_told
    kept = [name for name in ("cached_tokens", "kv_transfer", "_bytes") if name in told[0]]
    assert not kept and all(name in told[1] for name in ("cached_tokens", "attention_bytes"))


@pytest.mark.parametrize(("salt", "is_told"), [("mine", True), (None, False)])
async def test_who_hands_over_itself_under_a_salt_learns_what_moved(
    served: ServedModel, ids: tuple[int, ...], salt: str | None, is_told: bool
) -> None:
    """The doctor, say: no prefix of others can be among it."""
    silent = tiny_serving(
        served.tokenizer, enable_prompt_tokens_details=False, accept_kv_transfer_params=True
    )
    asked: dict[str, Any] = {"kv_transfer_params": {"do_remote_decode": True}, "max_tokens": 1}
    async with running(ScriptedGenerator(outputs_of(ids[:1], kv_transfer=STATS)), silent) as base:
        (line,) = await post_lines(base, "/v1/completions", prompt=[5], cache_salt=salt, **asked)
    assert ("kv_transfer" in json.loads(line)["usage"]) == is_told


@pytest.mark.parametrize("per_step", [1, 3])
async def test_completion_stream_equals_the_whole(
    served: ServedModel, ids: tuple[int, ...], per_step: int
) -> None:
    generator = ScriptedGenerator(outputs_of(ids, per_step=per_step))
    async with running(generator, served) as base:
        stream = await client_of(base).completions.create(model="tiny", prompt="hi", stream=True)
        chunks = await collect(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == TEXT
    assert [c.choices[0].finish_reason for c in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert not any("\ufffd" in chunk.choices[0].text for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


async def test_chat_in_one_piece_and_as_stream(served: ServedModel, ids: tuple[int, ...]) -> None:
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        chats = client_of(base).chat.completions
        whole = await chats.create(model="tiny", messages=TURN)
        chunks = await collect(await chats.create(model="tiny", messages=TURN, stream=True))
    message = whole.choices[0].message
    assert (whole.object, message.role, message.content) == ("chat.completion", "assistant", TEXT)
    roles = [chunk.choices[0].delta.role for chunk in chunks]
    assert roles == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content for chunk in chunks) == TEXT
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_usage_chunk_comes_last_and_done_ends_the_stream(
    served: ServedModel, ids: tuple[int, ...]
) -> None:
    script = outputs_of(ids, kv_transfer=STATS)
    options = {"include_usage": True}
    async with running(ScriptedGenerator(script), served) as base:
        lines = await post_lines(
            base, "/v1/completions", prompt=[1], stream=True, stream_options=options
        )
        chunks = await collect(
            await client_of(base).chat.completions.create(
                model="tiny", messages=TURN, stream=True, stream_options={"include_usage": True}
            )
        )
    assert lines[-1] == "data: [DONE]"
    assert '"choices":[]' in lines[-2] and '"usage":null' in lines[0]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == len(ids)
    assert chunks[-1].usage.kv_transfer["state_bytes"] == 4
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_every_token_of_a_stream_has_a_chunk(
    served: ServedModel, ids: tuple[int, ...]
) -> None:
    """Load tools time tokens by chunks: special tokens, half characters and held text count too."""
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    script = outputs_of((0, *ids, 1))
    async with running(ScriptedGenerator(script), served) as base:
        client = client_of(base)
        how: Any = {"model": "tiny", "stream": True, "stream_options": options, "stop": "x €!"}
        texts = await collect(await client.completions.create(prompt=[1], **how))
        chats = await collect(await client.chat.completions.create(messages=TURN, **how))
    assert [len(texts), len(chats)] == [len(script) + 1, len(script) + 2]
    counted = [chunk.usage.completion_tokens for chunk in texts]
    assert counted == [*range(1, len(script) + 1), len(script)]
    assert "".join(chunk.choices[0].text for chunk in texts[:-1]) == TEXT


async def test_n_and_several_prompts(served: ServedModel, ids: tuple[int, ...]) -> None:
    generator = ScriptedGenerator(outputs_of(ids))
    async with running(generator, served) as base:
        completions = client_of(base).completions
        whole = await completions.create(model="tiny", prompt=[[1, 2], [3]], n=2, seed=7)
        chunks = await collect(
            await completions.create(model="tiny", prompt=["a", "b"], n=2, stream=True)
        )
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert {choice.text for choice in whole.choices} == {TEXT}
    assert whole.usage is not None and whole.usage.prompt_tokens_details is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (3, 4 * len(ids))
    assert whole.usage.prompt_tokens_details.cached_tokens == 6
    assert [r.sampling.seed for r in generator.requests[:4]] == [7, 8, 7, 8]
    for index in range(4):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == TEXT
        assert own[-1].finish_reason == "length"


async def test_return_token_ids(served: ServedModel, ids: tuple[int, ...]) -> None:
    asked = {"return_token_ids": True}
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        client = client_of(base)
        whole = await client.completions.create(model="tiny", prompt=[5, 6], extra_body=asked)
        chunks = await collect(
            await client.completions.create(
                model="tiny", prompt=[5, 6], stream=True, extra_body=asked
            )
        )
        chat: Any = await client.chat.completions.create(
            model="tiny", messages=TURN, extra_body=asked
        )
        chat_chunks = await collect(
            await client.chat.completions.create(
                model="tiny", messages=TURN, stream=True, extra_body=asked
            )
        )
    choice: Any = whole.choices[0]
    assert (choice.prompt_token_ids, choice.token_ids) == ([5, 6], list(ids))
    assert chunks[0].choices[0].prompt_token_ids == [5, 6]
    assert [token for c in chunks for token in c.choices[0].token_ids] == list(ids)
    assert len(chat.prompt_token_ids) > 2 and chat.choices[0].token_ids == list(ids)
    assert chat_chunks[0].prompt_token_ids == chat.prompt_token_ids
    assert [token for c in chat_chunks[1:] for token in c.choices[0].token_ids] == list(ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_string_cuts_text_and_generation(
    served: ServedModel, ids: tuple[int, ...], stream: bool
) -> None:
    generator = ScriptedGenerator(outputs_of(ids)[:-1], endless=True)
    stop = ["never", " € st"]
    async with running(generator, served) as base:
        completions = client_of(base).completions
        reply: Any = await completions.create(model="tiny", prompt=[1], stop=stop, stream=stream)
        last = [chunk.choices[0] async for chunk in reply] if stream else reply.choices
    assert "".join(choice.text for choice in last) == "the fox"
    assert (last[-1].finish_reason, last[-1].stop_reason) == ("stop", " € st")
    assert (generator.open, generator.cancelled) == (0, 1)


@pytest.mark.parametrize(("min_tokens", "text"), [(1, "x"), (2, "xyx"), (3, "xyx")])
async def test_stop_strings_wait_for_min_tokens(
    served: ServedModel, min_tokens: int, text: str
) -> None:
    ids = served.tokenizer.encode("xyxyxy", add_special_tokens=False)
    assert len(ids) == 6
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        reply = await client_of(base).completions.create(
            model="tiny", prompt=[1], stop="y", extra_body={"min_tokens": min_tokens}
        )
    assert reply.choices[0].text == text


async def test_stop_token_is_counted_but_not_shown(served: ServedModel) -> None:
    ids = served.tokenizer.encode("ab", add_special_tokens=False)
    script = outputs_of(ids, finish_reason=FinishReason.STOP, stop_reason=ids[-1])
    async with running(ScriptedGenerator(script), served) as base:
        reply: Any = await client_of(base).completions.create(model="tiny", prompt=[1])
        shown = await client_of(base).completions.create(
            model="tiny", prompt=[1], extra_body={"include_stop_str_in_output": True}
        )
    assert (reply.choices[0].text, shown.choices[0].text) == ("a", "ab")
    assert (reply.choices[0].stop_reason, reply.usage.completion_tokens) == (ids[-1], 2)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_sequential_pd_proxy_gets_and_passes_on_kv_transfer_params(
    served: ServedModel, path: str
) -> None:
    made = KVTransferParams(do_remote_prefill=True, remote_engine_id="p0", remote_block_ids=((1,),))
    generator = ScriptedGenerator(outputs_of([70], kv_transfer_params=made))
    prompt: dict[str, Any] = {"prompt": [5, 6]} if "chat" not in path else {"messages": TURN}
    asked = {"do_remote_decode": True, "do_remote_prefill": False, "remote_host": None}
    body = {**prompt, "model": "tiny", "max_tokens": 1, "kv_transfer_params": asked}
    async with running(generator, replace(served, accept_kv_transfer_params=True)) as base:
        whole = json.loads("".join(await post_lines(base, path, **body, min_tokens=9)))
        lines = await post_lines(base, path, **body, stream=True)
    assert whole["kv_transfer_params"]["remote_engine_id"] == "p0"
    assert whole["kv_transfer_params"]["remote_block_ids"] == [[1]]
    assert '"remote_engine_id":"p0"' in lines[-2] and lines[-1] == "data: [DONE]"
    assert all(request.kv_transfer_params is not None for request in generator.requests)


async def test_proxy_ignores_what_clients_send_as_kv_transfer_params(served: ServedModel) -> None:
    generator = ScriptedGenerator(outputs_of([70]))
    async with running(generator, served) as base:
        hostile: list[Any] = ["x", {"do_remote_prefill": True, "remote_host": "10.0.0.1"}, [[]] * 9]
        for value in hostile:
            body = {"kv_transfer_params": value}
            await client_of(base).completions.create(model="tiny", prompt=[1], extra_body=body)
    assert [request.kv_transfer_params for request in generator.requests] == [None] * 3


@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (OverloadedError("full", retry_after_s=3), 429, "3"),
        (UnavailableError("no node", retry_after_s=2), 503, "2"),
        (DeadlineExceededError("late"), 504, None),
        (KVLoadError("lost"), 502, None),
        (EngineDeadError("dead"), 500, None),
        (EngineGenerateError("the model produced NaN logits"), 500, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_error_before_the_first_token_is_an_http_status(
    served: ServedModel, error: TandemError, status: int, retry_after: str | None, stream: bool
) -> None:
    async with running(ScriptedGenerator([], error=error), served) as base:
        with pytest.raises(openai.APIStatusError) as caught:
            await client_of(base).completions.create(model="tiny", prompt=[1], stream=stream)
    assert caught.value.status_code == status
    assert caught.value.response.headers.get("retry-after") == retry_after
    body: Any = caught.value.body
    assert (body["message"], body["code"], body["param"]) == (str(error), status, None)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_error_inside_a_stream_is_its_last_line(
    served: ServedModel, ids: tuple[int, ...], path: str
) -> None:
    generator = ScriptedGenerator(outputs_of(ids)[:3], error=KVLoadError("prefill lost"))
    prompt: dict[str, Any] = {"prompt": [5]} if "chat" not in path else {"messages": TURN}
    async with running(generator, served) as base:
        lines = await post_lines(base, path, **prompt, stream=True)
        with pytest.raises(openai.APIError, match="prefill lost"):
            await collect(
                await client_of(base).completions.create(model="tiny", prompt=[1], stream=True)
            )
    assert '"error":{"message":"prefill lost","type":"upstream_error"' in lines[-1]
    assert "[DONE]" not in "".join(lines) and len(lines) > 2


@pytest.mark.parametrize("reason", [None, FinishReason.ABORT, FinishReason.ERROR])
async def test_generation_without_an_end_is_never_a_silent_stop(
    served: ServedModel, reason: FinishReason | None
) -> None:
    script = [GenerateOutput(token_ids=(70,)), GenerateOutput(finish_reason=reason)]
    async with running(ScriptedGenerator(script), served) as base:
        with pytest.raises(openai.InternalServerError):
            await client_of(base).completions.create(model="tiny", prompt=[1])
        lines = await post_lines(base, "/v1/completions", prompt=[1], stream=True)
    assert '"error"' in lines[-1]


async def test_one_failing_choice_ends_the_others(
    served: ServedModel, ids: tuple[int, ...]
) -> None:
    generator = ScriptedGenerator(outputs_of(ids)[:2], error=KVLoadError("lost"))
    async with running(generator, served) as base:
        with pytest.raises(openai.APIStatusError):
            await client_of(base).completions.create(model="tiny", prompt=[1], n=5)
    assert (len(generator.requests), generator.open) == (5, 0)


async def test_token_ids_work_without_tokenizer() -> None:
    async with running(ScriptedGenerator(outputs_of([9, 8])), tiny_serving(Tokenizer())) as base:
        completions = client_of(base).completions
        reply: Any = await completions.create(
            model="tiny", prompt=[1], logprobs=0, extra_body={"return_token_ids": True}
        )
        with pytest.raises(openai.BadRequestError, match=r"tokenizer\.json"):
            await completions.create(model="tiny", prompt="hi")
    assert (reply.choices[0].text, reply.choices[0].token_ids) == ("", [9, 8])
    assert reply.choices[0].logprobs.tokens == ["token_id:9", "token_id:8"]


async def test_models_tokenize_and_detokenize(served: ServedModel) -> None:
    async with running(ScriptedGenerator([]), served) as base, aiohttp.ClientSession() as session:
        models = (await client_of(base).models.list()).data
        alias = await client_of(base).models.retrieve("tiny-alias")
        body = {"prompt": TEXT, "return_token_strs": True}
        async with session.post(f"{base}/tokenize", json=body) as reply:
            tokens = await reply.json()
        async with session.post(f"{base}/detokenize", json={"tokens": tokens["tokens"]}) as reply:
            text = await reply.json()
        async with session.post(f"{base}/tokenize", json={"messages": TURN}) as reply:
            assert (await reply.json())["tokens"][0] == 0
        async with session.post(f"{base}/detokenize", json={"tokens": [-1]}) as reply:
            assert reply.status == 400
    told = [(m.id, m.root, m.max_model_len, m.owned_by) for m in models]  # type: ignore[attr-defined]
    assert told == [(name, "tiny", 256, "tandem") for name in ("tiny", "tiny-alias")]
    assert alias.id == "tiny-alias"
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    assert text == {"prompt": TEXT}
