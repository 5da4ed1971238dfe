"""A node whose requests fail in a row rests; one request at a time tries whether it works again."""

import asyncio
from typing import Any

import openai
import pytest

from engine.errors import EngineGenerateError, OverloadedError, TandemError
from serving.breaker import MAX_FAILURES, MAX_PAUSE_S, MIN_PAUSE_S, Breaker
from tests.support.api.node_double import ScriptedNode, base_of, metric, running_cluster
from tests.support.nodes.clock import Clock

ASK: dict[str, Any] = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
ROUNDS = 2 * MAX_FAILURES + 4


def test_pauses_double_and_each_ends_with_one_trial() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for number in range(MAX_FAILURES):
        assert not breaker.rest_s
        assert breaker.failed() == (number == MAX_FAILURES - 1)
    assert not any(breaker.failed() for _ in range(50))  # they had begun before it rested
    pause = MIN_PAUSE_S
    for _ in range(6):
        clock.now += pause - 0.1
        assert breaker.rest_s
        clock.now += 0.2
        assert not breaker.rest_s
        breaker.began()
        assert breaker.rest_s  # for all others
        assert breaker.failed()
        pause = min(2 * pause, MAX_PAUSE_S)
    clock.now += MAX_PAUSE_S
    breaker.began()
    breaker.worked()
    assert not breaker.rest_s


def test_a_trial_that_never_ends_is_followed_by_another() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES):
        breaker.failed()
    clock.now += MIN_PAUSE_S
    breaker.began()
    clock.now += MAX_PAUSE_S
    assert not breaker.rest_s


def test_a_trial_that_says_nothing_of_the_node_is_followed_by_another_at_once() -> None:
    clock = Clock()
    breaker = Breaker(clock)
    for _ in range(MAX_FAILURES):
        breaker.failed()
    breaker.unjudged()  # it had begun before the node rested
    assert breaker.rest_s
    clock.now += MIN_PAUSE_S
    breaker.began()
    assert breaker.rest_s
    breaker.unjudged()
    assert not breaker.rest_s
    breaker.began()
    assert breaker.failed() and breaker.rest_s


@pytest.mark.parametrize("kind", ["prefill", "decode"])
async def test_a_node_that_fails_each_request_is_left_alone(kind: str) -> None:
    """It says that it is ready, so only its requests tell."""
    bad, good = (ScriptedNode(name, kind) for name in ("bad", "good"))
    d = ScriptedNode("d")
    bad.error = TandemError("bug")
    ps, ds = ([bad, good], [d]) if kind == "prefill" else ([], [bad, good])
    async with running_cluster(ps, ds, routing_policy="round_robin") as client:
        for _ in range(ROUNDS):
            await client.completions.create(**ASK)
        base = base_of(client)
        assert await metric(base, "tandem_proxy_resting_nodes", kind=kind) == [1]
    assert len(bad.requests) == MAX_FAILURES
    assert len(good.requests) == ROUNDS


async def test_a_node_whose_requests_hang_is_left_alone() -> None:
    hung, good = ScriptedNode("hung", hang_at=0), ScriptedNode("good")
    options = {"routing_policy": "round_robin", "first_token_timeout": 0.1}
    async with running_cluster([], [hung, good], **options) as client:
        for _ in range(ROUNDS):
            await client.completions.create(**ASK)
    assert len(hung.requests) == MAX_FAILURES


@pytest.mark.parametrize("error", [OverloadedError("full"), EngineGenerateError("NaN")], ids=repr)
async def test_full_nodes_and_requests_that_break_do_not_count(error: TandemError) -> None:
    d = ScriptedNode("d", error=error)
    async with running_cluster([], [d]) as client:
        for _ in range(ROUNDS):
            with pytest.raises(openai.APIStatusError):
                await client.completions.create(**ASK)
        base = base_of(client)
        assert await metric(base, "tandem_proxy_resting_nodes", kind="decode") == [0]


async def test_answers_that_end_at_a_stop_string_are_good_ones(
    tiny_files: dict[str, bytes],
) -> None:
    """The proxy leaves such an answer before its node has ended it."""
    asked = {**ASK, "max_tokens": 12}
    d, e = (ScriptedNode(name, files=tiny_files) for name in "de")
    async with running_cluster([], [d, e], routing_policy="round_robin") as client:
        text = (await client.completions.create(**asked)).choices[0].text
        for _ in range(MAX_FAILURES):
            d.error = TandemError("hiccup")
            for _ in range(2):
                await client.completions.create(**asked)
            d.error = None
            for _ in range(2):
                answer = await client.completions.create(**asked, stop=text[3:5])
                assert answer.choices[0].finish_reason == "stop"
        base = base_of(client)
        assert await metric(base, "tandem_proxy_resting_nodes", kind="decode") == [0]


async def test_the_only_decode_node_is_tried_all_the_same() -> None:
    d = ScriptedNode("d", error=TandemError("bug"))
    async with running_cluster([], [d]) as client:
        asked = [client.completions.create(**ASK) for _ in range(ROUNDS)]
        failed = await asyncio.gather(*asked, return_exceptions=True)
        assert all(isinstance(error, openai.APIStatusError) for error in failed)
        d.error = None
        assert (await client.completions.create(**ASK)).usage is not None
        base = base_of(client)
        assert await metric(base, "tandem_proxy_resting_nodes", kind="decode") == [0]
