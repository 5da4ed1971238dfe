"""Log-probabilities in replies, whole and streamed, through the real openai client."""

from functools import partial

import pytest

from engine.types import PromptLogprobs
from serving.api.served_model import ServedModel
from tests.support.api.api_double import TEXT, ScriptedGenerator, outputs_of, running
from tests.unit.api.test_api_http import TURN, client_of, collect

pytestmark = pytest.mark.asyncio


async def test_completion_logprobs(served: ServedModel, ids: tuple[int, ...]) -> None:
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        completions = client_of(base).completions
        reply = await completions.create(model="tiny", prompt=[1], logprobs=1)
        chunks = await collect(
            await completions.create(model="tiny", prompt=[1], logprobs=1, stream=True)
        )
    found = reply.choices[0].logprobs
    assert found is not None and found.tokens and found.text_offset and found.top_logprobs
    assert found.tokens[0] == served.tokenizer.token_text(ids[0])
    assert found.token_logprobs == [-0.5] * len(ids)
    assert found.top_logprobs[0] == {found.tokens[0]: -0.5, served.tokenizer.token_text(65): -9999}
    assert found.text_offset[:2] == [0, len(found.tokens[0])]
    streamed = [token for c in chunks for token in c.choices[0].logprobs.tokens]
    assert streamed == found.tokens
    assert [it for c in chunks for it in c.choices[0].logprobs.text_offset] == found.text_offset


@pytest.mark.parametrize("stop", [["zzzz"], ["zzzz", "한국 x"]])
async def test_offsets_are_those_of_the_text_however_it_is_cut(
    served: ServedModel, stop: list[str]
) -> None:
    text = "é 😀한국 ok"
    ids = served.tokenizer.encode(text, add_special_tokens=False)
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        ask = partial(client_of(base).completions.create, model="tiny", prompt=[1], stop=stop)
        reply = await ask(logprobs=1)
        chunks = await collect(await ask(logprobs=1, stream=True))
    found = reply.choices[0].logprobs
    assert reply.choices[0].text == text and found is not None and found.tokens
    assert [it for c in chunks for it in c.choices[0].logprobs.text_offset] == found.text_offset
    # A token that is a whole piece of text stands where it says; parts of one character share.
    for token, offset in zip(found.tokens, found.text_offset or [], strict=True):
        assert "\ufffd" in token or text.startswith(token, offset)
    assert found.text_offset is not None and found.text_offset[-1] == len(text) - len(
        found.tokens[-1]
    )


@pytest.mark.parametrize("skips", [True, False])
async def test_offsets_of_an_echo_are_those_of_its_text(served: ServedModel, skips: bool) -> None:
    text = "日本 <|im_end|>xé"
    prompt = served.tokenizer.encode(text, add_special_tokens=False)
    count = len(prompt) - 1
    rows = PromptLogprobs(0, prompt[1:], (-0.5,) * count, (1,) * count)
    script = outputs_of([70], prompt_logprobs=rows)
    async with running(ScriptedGenerator(script), served) as base:
        ask = partial(client_of(base).completions.create, model="tiny", echo=True, logprobs=0)
        extra = {"skip_special_tokens": skips}
        sent = [await ask(prompt=text), await ask(prompt=list(prompt), extra_body=extra)]
    decoded = text.replace("<|im_end|>", "") if skips else text
    for reply, shown in zip(sent, [text, decoded], strict=True):
        found = reply.choices[0].logprobs
        assert found is not None and found.tokens and found.text_offset
        assert reply.choices[0].text.startswith(shown)
        offsets = found.text_offset
        assert offsets == sorted(offsets) and offsets[-1] == len(shown)
        for token, offset in zip(found.tokens, offsets, strict=True):
            is_hidden = token == "<|im_end|>" and shown != text
            assert "\ufffd" in token or is_hidden or reply.choices[0].text.startswith(token, offset)


async def test_chat_logprobs_carry_exact_bytes(served: ServedModel, ids: tuple[int, ...]) -> None:
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        chats = client_of(base).chat.completions
        whole = await chats.create(model="tiny", messages=TURN, logprobs=True, top_logprobs=2)
        stream = await chats.create(model="tiny", messages=TURN, logprobs=True, stream=True)
        chunks = await collect(stream)
    assert whole.choices[0].logprobs is not None
    content = whole.choices[0].logprobs.content
    assert content is not None and len(content) == len(ids)
    assert b"".join(bytes(entry.bytes or []) for entry in content).decode() == TEXT
    assert content[0].top_logprobs[1].logprob == -9999
    streamed = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert sum(len(part.content) for part in streamed) == len(ids)


async def test_no_logprobs_unless_asked_for(served: ServedModel, ids: tuple[int, ...]) -> None:
    async with running(ScriptedGenerator(outputs_of(ids)), served) as base:
        reply = await client_of(base).completions.create(model="tiny", prompt=[1])
    assert reply.choices[0].logprobs is None
