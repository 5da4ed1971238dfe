"""A decode node that is killed in the middle of answers: they go on elsewhere, as on one node.

The oracle is the same request on one node that nobody disturbs.
"""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import pytest

from benchmarks.support.small_models import VOCABULARY
from engine.errors import InvalidRequestError
from engine.types import GenerateRequest, SamplingParams
from proxy.backends.tandem import prefill_request
from tests.support.nodes.asking import ask, question, stream, streamed_ids
from tests.support.nodes.cluster import Cluster, Generation, Node, generate, until
from tests.support.nodes.pairs import FAMILIES, prompt_of, request_of
from tests.support.nodes.processes import Launcher, ServerProcess
from tests.tiers import everyday

LONG = {"max_tokens": 250, "logprobs": 2}
SEEDED = {"temperature": 1.0, "seed": 7, "top_p": 0.95}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
CASES: dict[str, dict[str, Any]] = {
    "greedy": LONG,
    "seeded": {**LONG, **SEEDED},
    "penalties": {**LONG, **PENALTIES},
    "seeded, with penalties": {**LONG, **SEEDED, **PENALTIES},
    "grammar": {**LONG, **SEEDED, "structured_outputs": {"regex": "([a-f]{3}[0-9]{2}-)+"}},
    "min_tokens": {**LONG, **SEEDED, "ignore_eos": False, "min_tokens": 240},
    "two choices": {**LONG, **SEEDED, "n": 2},
}
USABLE = "tandem_proxy_available_nodes"
BROKEN = "tandem_proxy_broken_streams_total"
NEAR = 1e-3
"""Of log-probabilities: what is computed again in one chunk is rounded otherwise."""


SAMPLED = SamplingParams(
    max_tokens=40, temperature=0.9, seed=5, presence_penalty=0.5, logprobs=2, ignore_eos=True
)


@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5",)))
async def test_an_answer_goes_on_at_any_token_on_one_node_or_through_two(
    shared: Cluster, checkpoints: dict[str, Path], family: str
) -> None:
    p, d = await shared.pair(checkpoints[family])
    request = request_of(prompt_of(50), SAMPLED)
    whole = await generate(d, request)
    for num_sent in (1, 13, 14, 15, 39):  # around a block boundary, and the last token
        sent = tuple(whole.token_ids[:num_sent])
        asked = msgspec.structs.replace(request, output_token_ids=sent)
        for rest in (await generate(d, asked), await through_both(p, d, asked)):
            assert rest.token_ids == whole.token_ids[num_sent:]
            assert rest.last.finish_reason == whole.last.finish_reason
            expected = [entry.logprob for entry in whole.logprobs[num_sent:]]
            assert [entry.logprob for entry in rest.logprobs] == pytest.approx(expected, abs=NEAR)
    for wrong in ((512,), (-1,), (5,) * 40, (5,) * 400):
        with pytest.raises(InvalidRequestError, match="output_token_ids"):
            await generate(d, msgspec.structs.replace(request, output_token_ids=wrong))
    letters = llguidance.LLMatcher.grammar_from_regex("[a-f]+")
    bound = msgspec.structs.replace(SAMPLED, grammar=letters)
    no_letter = (VOCABULARY - 1,)
    asked = msgspec.structs.replace(request, sampling=bound, output_token_ids=no_letter)
    with pytest.raises(InvalidRequestError, match="grammar does not allow"):
        await generate(d, asked)


async def through_both(p: Node, d: Node, request: GenerateRequest) -> Generation:
    params = (await generate(p, prefill_request(request))).last.kv_transfer_params
    assert params is not None
    assert params.remote_num_tokens == len(request.token_ids)
    return await generate(d, msgspec.structs.replace(request, kv_transfer_params=params))


async def test_answers_of_a_killed_d_go_on_on_another_one(real: Launcher) -> None:
    p, d, d2 = (real.launch(f"{kind}_node") for kind in ("prefill", "decode", "decode"))
    for node in (p, d, d2):
        node.wait_until_serving()
    proxy = real.proxy(p, d, "--decode", d2.url, "--routing-policy", "round_robin")
    proxy.wait_for(USABLE, 3)
    asked = {name: question(prompt_of(100, salt=3), **case) for name, case in CASES.items()}
    alone = {name: (await ask(d2.url, body)).body["choices"] for name, body in asked.items()}
    text = alone["seeded"][0]["text"]
    asked["stop string"] = {**asked["seeded"], "stop": [text[len(text) // 2 :][:6]]}
    alone["stop string"] = (await ask(d2.url, asked["stop string"])).body["choices"]
    # Twice each, one after the other, so that about half of them is on the node that dies.
    running = [(name, *begin(proxy, asked[name])) for name in (*asked, *asked)]
    await until(lambda: all(len(events) > 3 for _, events, _ in running))
    d.kill()
    for name, events, task in running:
        await task
        assert_as_alone(events, alone[name], name)
    assert proxy.metrics()[BROKEN] >= len(CASES) // 2
    assert "a stream goes on on another node" in proxy.said
    assert "a stream ends with an error" not in proxy.said
    again = real.node("decode_node", "--port", str(d.port))
    for node in (p, d2, again):
        node.assert_at_rest()


def begin(
    proxy: ServerProcess, body: dict[str, Any]
) -> tuple[list[dict[str, Any]], asyncio.Task[list[dict[str, Any]]]]:
    """A stream that begins, and its events as they come."""
    events: list[dict[str, Any]] = []
    told = {"stream": True, "stream_options": {"include_usage": True}}
    return events, asyncio.create_task(stream(proxy.url, {**body, **told}, events))


def assert_as_alone(events: list[dict[str, Any]], alone: list[dict[str, Any]], name: str) -> None:
    """Tokens, text, end and counts are equal; log-probabilities but for their rounding."""
    for choice in alone:
        chunks = list(chunks_of(events, choice["index"]))
        ids = streamed_ids([{"choices": chunks}])
        assert ids == choice["token_ids"], name
        assert "".join(chunk["text"] for chunk in chunks) == choice["text"], name
        assert chunks[-1]["finish_reason"] == choice["finish_reason"], name
        told = (chunk["logprobs"] or {"token_logprobs": []} for chunk in chunks)
        logprobs = [it for each in told for it in each["token_logprobs"]]
        assert logprobs == pytest.approx(choice["logprobs"]["token_logprobs"], abs=NEAR), name
    usage = events[-1]["usage"]
    assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in alone)
    assert usage["prompt_tokens"] == 100


def chunks_of(events: list[dict[str, Any]], index: int) -> Iterator[dict[str, Any]]:
    return (it for event in events for it in event["choices"] if it["index"] == index)
