"""Log-probabilities of prompts: those of transformers, and through a proxy those of one node."""

import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
import transformers

from engine.types import GenerateRequest, PromptLogprobs, SamplingParams
from tests.e2e.test_five_groups import FORMED, plan_of
from tests.support.nodes.asking import CHAT, COMPLETIONS, TIMEOUT, ask, question
from tests.support.nodes.bare_engine import BareEngine
from tests.support.nodes.cluster import CONTEXT, Generation
from tests.support.nodes.five_groups import five_groups
from tests.support.nodes.oracle import reference_logits
from tests.support.nodes.pairs import MARGIN, prompt_of
from tests.support.nodes.processes import API_KEY, ServedCluster

PROMPTS = [list(prompt_of(length, salt=length)) for length in (1, 2, 64, 65, 150)]
PULLS = "vllm:nixl_bytes_transferred_count"
TURNS = [{"role": "user", "content": "the quick brown fox"}]


async def both(served: ServedCluster, path: str, **body: Any) -> dict[str, Any]:
    """The reply of the proxy, which must be that of one node but for ids and times."""
    replies = [(await ask(it.url, body, path=path)) for it in (served.proxy, served.d)]
    mine, alone = (_comparable(reply.body) for reply in replies)
    assert mine == alone
    return mine


def _comparable(body: dict[str, Any]) -> dict[str, Any]:
    assert "choices" in body, body
    varying = ("id", "created", "system_fingerprint")
    kept = {key: value for key, value in body.items() if key not in varying}
    return {**kept, "usage": {k: v for k, v in body["usage"].items() if k.endswith("_tokens")}}


@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
async def test_an_echo_has_the_logprobs_of_transformers(
    served: ServedCluster, model: Path, prompt: list[int]
) -> None:
    reference = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    scored = torch.log_softmax(reference_logits(reference, prompt), dim=-1)[:-1]
    expected = scored.gather(-1, torch.tensor(prompt[1:], dtype=torch.int64).unsqueeze(-1))
    asked = question(prompt, echo=True, logprobs=2, return_tokens_as_token_ids=True)
    columns, count = [], len(prompt)
    for max_tokens in (0, 1, 12):
        reply = await both(served, COMPLETIONS, **{**asked, "max_tokens": max_tokens})
        found = reply["choices"][0]["logprobs"]
        assert reply["usage"]["completion_tokens"] == max_tokens
        assert {len(column) for column in found.values()} == {count + max_tokens}
        assert found["tokens"][:count] == [f"token_id:{token}" for token in prompt]
        assert found["token_logprobs"][0] is None is found["top_logprobs"][0]
        ours = torch.tensor(found["token_logprobs"][1:count])
        assert torch.allclose(ours, expected.flatten(), atol=MARGIN, rtol=0)
        best = torch.tensor([max(row.values()) for row in found["top_logprobs"][1:count]])
        assert torch.allclose(best, scored.amax(-1), atol=MARGIN, rtol=0)
        columns.append(found["token_logprobs"][:count])
    # However much follows a prompt, its own log-probabilities are the same, bit by bit.
    assert columns[0] == columns[1] == columns[2]


async def test_several_prompts_at_once_have_each_their_own(served: ServedCluster) -> None:
    """As lm-eval asks. Together the prompts round differently."""
    asked: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": 1}
    together = await ask(served.proxy.url, question(PROMPTS, **asked))
    for choice, prompt in zip(together.body["choices"], PROMPTS, strict=True):
        alone = (await ask(served.d.url, question(prompt, **asked))).body["choices"][0]
        values = [it["logprobs"]["token_logprobs"][1 : len(prompt)] for it in (choice, alone)]
        assert values[0] == pytest.approx(values[1], abs=MARGIN)


async def test_a_prompt_with_logprobs_is_handed_over_like_any_other(served: ServedCluster) -> None:
    asked = question(PROMPTS[-1], prompt_logprobs=3, max_tokens=6)
    pulls = served.d.metrics()[PULLS]
    reply = await ask(served.proxy.url, asked)
    assert served.d.metrics()[PULLS] == pulls + 1
    rows = reply.body["choices"][0]["prompt_logprobs"]
    assert rows[0] is None and len(rows) == len(PROMPTS[-1])
    for token, row in zip(PROMPTS[-1][1:], rows[1:], strict=True):
        assert 3 <= len(row) <= 4
        mine = row[str(token)]
        assert {entry["rank"] for entry in row.values()} == {1, 2, 3, mine["rank"]}
        higher = sum(entry["logprob"] > mine["logprob"] for entry in row.values())
        assert mine["rank"] > higher and (mine["rank"] - 1 == higher or mine["rank"] > 3)


async def test_chats_and_texts_have_them_too(served: ServedCluster) -> None:
    chat = await both(served, CHAT, messages=TURNS, prompt_logprobs=1, max_tokens=4, temperature=0)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    body = question("the quick brown fox", echo=True, logprobs=0, prompt_logprobs=2)
    text = await both(served, COMPLETIONS, **body)
    choice = text["choices"][0]
    assert choice["text"].startswith("the quick brown fox")
    tokens, offsets = (choice["logprobs"][key] for key in ("tokens", "text_offset"))
    for token, offset in list(zip(tokens, offsets, strict=True))[: len(choice["prompt_logprobs"])]:
        assert choice["text"].startswith(token, offset)
    assert {len(row) for row in choice["prompt_logprobs"][1:]} <= {2, 3}


async def test_a_streamed_echo_is_the_whole_one(served: ServedCluster) -> None:
    body = question("the quick brown fox", echo=True, logprobs=1)
    whole = (await ask(served.proxy.url, body)).body["choices"][0]
    async with aiohttp.ClientSession(timeout=TIMEOUT) as session:
        reply = await session.post(
            f"{served.proxy.url}{COMPLETIONS}",
            json={**body, "stream": True},
            headers={"authorization": f"Bearer {API_KEY}"},
        )
        events = (await reply.text()).strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for column in ("tokens", "token_logprobs", "top_logprobs"):
        assert [it for c in choices for it in c["logprobs"][column]] == whole["logprobs"][column]


async def test_too_many_are_refused_before_any_node_computes(served: ServedCluster) -> None:
    body = question(PROMPTS[-1], prompt_logprobs=21)
    error = (await ask(served.proxy.url, body)).error(400)
    assert error["param"] == "prompt_logprobs"


REQUESTS = [
    GenerateRequest(
        request_id="r",
        prompt_token_ids=prompt_of(length, salt=salt),
        sampling=SamplingParams(
            max_tokens=150, temperature=0.0, logprobs=0, ignore_eos=True, prompt_logprobs=2
        ),
    )
    for length, salt in ((180, 1), (180, 1), (200, 2), (150, 3), (170, 1), (64, 5))
]


def scored_of(made: Generation) -> PromptLogprobs:
    assert made.prompt_logprobs is not None
    return made.prompt_logprobs


def test_neither_hits_nor_chunks_nor_preemptions_lose_any() -> None:
    """No cached prefix is read: of its tokens nothing would be known but their blocks."""
    roomy = plan_of(FORMED)
    with BareEngine(five_groups(roomy.groups), roomy, prefix_caching=False) as engine:
        alone = [engine.generate(request)[0] for request in REQUESTS]
    with BareEngine(five_groups(roomy.groups), roomy) as engine:
        cached = [engine.generate(request)[0] for request in REQUESTS]
    assert [it.last.num_cached_tokens for it in cached] == [0] * len(REQUESTS)
    tight = plan_of(FORMED, num_units=int(1.5 * roomy.units_for(CONTEXT)))
    with BareEngine(five_groups(tight.groups), tight, max_num_seqs=6) as engine:
        together = engine.generate(*REQUESTS)
        assert engine.scheduler.stats.num_preemptions
    expected = [*map(scored_of, alone), *map(scored_of, alone)]
    for mine, other in zip(map(scored_of, [*together, *cached]), expected, strict=True):
        assert [row[0].token_id for row in mine.rows()] == [row[0].token_id for row in other.rows()]
        assert mine.logprobs == pytest.approx(other.logprobs, abs=MARGIN)
