"""Hand-overs that keep failing: what is said of them, who is not paired meanwhile, and the end."""

import json
from typing import Any

import openai
import structlog

from engine.errors import KVTransferParamsError
from engine.types import HandOverProblem
from serving.hand_over_problems import HandOverProblems
from tests.support.api.node_double import (
    ASK,
    PROMPT,
    ScriptedNode,
    base_of,
    fetch,
    metric,
    running_cluster,
    tokens_of,
    until,
)
from tests.support.nodes.clock import Clock


def fail(problems: HandOverProblems, engine_id: str = "p-1", *, lasting: bool = False) -> None:
    problems.failed(engine_id, "10.0.0.1:5", "peer_unreachable", detail="no route", lasting=lasting)


def test_one_failure_is_no_problem_unless_it_will_last_and_a_success_ends_it() -> None:
    problems = HandOverProblems(Clock())
    fail(problems)
    assert problems.present() == ()
    fail(problems)
    (found,) = problems.present()
    assert (found.engine_id, found.cause, found.count) == ("p-1", "peer_unreachable", 2)
    problems.worked("p-2", "10.0.0.1:5")  # p-1's next life
    assert problems.present() == ()
    fail(problems, lasting=True)
    assert len(problems.present()) == 1
    problems.worked("p-1", "10.0.0.1:5")
    assert problems.present() == ()


def test_pauses_double_up_to_a_minute_and_a_problem_nobody_tries_is_forgotten() -> None:
    clock = Clock()
    problems = HandOverProblems(clock)
    pauses = []
    fail(problems)
    for _ in range(8):
        fail(problems)
        (found,) = problems.present()
        pauses.append(found.retry_in_s)
        clock.now += found.retry_in_s
    assert pauses == [5, 10, 20, 40, 60, 60, 60, 60]
    clock.now += 301
    assert problems.present() == ()


def test_a_cause_is_logged_once_a_minute_and_peers_are_bounded() -> None:
    clock = Clock()
    problems = HandOverProblems(clock)
    with structlog.testing.capture_logs() as logs:
        for _ in range(100):
            fail(problems)
        clock.now += 61
        fail(problems)
        assert [log["more_since_last_line"] for log in logs] == [0, 99]
        for number in range(1000):
            fail(problems, f"other-{number}", lasting=True)
    assert len(problems.present()) == 64


def said_by_d(p: ScriptedNode) -> HandOverProblem:
    return HandOverProblem(
        engine_id=p.engine_id,
        address="10.0.0.1:5",
        cause="peer_does_not_fit",
        detail="transport is 'shm' here and 'zmq' there",
        count=3,
        since_s=4.0,
        retry_in_s=9.0,
    )


async def ask(client: openai.AsyncOpenAI, times: int) -> None:
    for _ in range(times):
        reply = await client.completions.create(**ASK, extra_body={"return_token_ids": True})
        assert (reply.choices[0].model_extra or {})["token_ids"] == tokens_of(PROMPT, 4)


async def ready(base: str) -> dict[str, Any]:
    status, text = await fetch(f"{base}/ready")
    assert status == 200
    answer: dict[str, Any] = json.loads(text)
    return answer


async def test_a_pair_that_d_calls_broken_is_not_used_until_d_says_otherwise() -> None:
    bad, good, d = (
        ScriptedNode("bad", "prefill"),
        ScriptedNode("good", "prefill"),
        ScriptedNode("d"),
    )
    async with running_cluster([bad, good], [d]) as client:
        base = base_of(client)
        nodes = {"d0": "serving", "p0": "serving", "p1": "serving"}
        assert await ready(base) == {"status": "ready", "reasons": [], "nodes": nodes}
        d.problems = (said_by_d(bad), said_by_d(ScriptedNode("foreign")))

        async def is_degraded() -> bool:
            return bool((await ready(base))["status"] == "degraded")

        await until(is_degraded)
        (reason,) = (await ready(base))["reasons"]
        assert reason.startswith("hand-overs from bad-incarnation to d-incarnation fail (3 in a")
        assert "peer_does_not_fit" in reason
        assert "10.0.0.1" not in reason  # who asks may be anybody
        with structlog.testing.capture_logs() as logs:
            await ask(client, 4)
            assert (len(bad.requests), len(good.requests)) == (0, 4)
            d.problems += (said_by_d(good),)
            await until(lambda: has_reasons(base, 2))
            await ask(client, 3)
        assert [log["event"] for log in logs if log["event"] != "request ended"] == [
            "a pair of nodes is not used: their hand-overs fail"
        ] * 2
        assert await metric(base, "tandem_proxy_local_prefills_total") == [3.0]
        d.problems = ()
        await until(lambda: has_reasons(base, 0))
        await ask(client, 2)
        assert len(bad.requests) >= 1


async def has_reasons(base: str, count: int) -> bool:
    return len((await ready(base))["reasons"]) == count


async def test_a_pair_that_d_refuses_twice_is_not_tried_a_third_time() -> None:
    p, d = ScriptedNode("p", "prefill"), ScriptedNode("d")
    d.refuses_params = KVTransferParamsError("remote_host '10.0.0.1' is not this machine")
    async with running_cluster([p], [d]) as client:
        await ask(client, 5)
        assert len(p.requests) == 2
        answer = await ready(base_of(client))
    assert answer["status"] == "degraded"
    assert "refused" in answer["reasons"][0]
