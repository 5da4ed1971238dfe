"""Workers of vLLM and SGLang in front of which the proxy stands: both requests of a request.

Each test names the complaint about another router that it answers, as repository and number.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from proxy.backends import http_worker, sglang
from tests.support.api.node_double import fetch, metric, until, until_status
from tests.support.workers.foreign_cluster import PROMPT, Foreign, foreign_cluster, workers_of
from tests.support.workers.vllm_double import TOKEN_OF_P
from tests.support.workers.worker_double import (
    BEFORE_HEADERS,
    OWN_WORDS,
    Asked,
    Fault,
    answer_to,
)
from tests.tiers import l_shape

pytestmark = pytest.mark.usefixtures("quick")

BROKEN = Fault("break", BEFORE_HEADERS)
HUNG = Fault("hang", BEFORE_HEADERS)
BACKENDS = ("vllm", "sglang")
P_FAULTS = {
    "502": Fault(status=502),
    "503": Fault(status=503),
    "504": Fault(status=504),
    "500": Fault(status=500),
    "broken": BROKEN,
}


def prompt_of(asked: Asked) -> list[int]:
    return list(asked.body.get("prompt") or asked.body["input_ids"])


def limits_of(asked: Asked) -> tuple[int, int]:
    """At most and at least so many tokens are asked for."""
    words = asked.body.get("sampling_params", asked.body)
    prefix = "" if words is asked.body else "new_"
    return words[f"max_{prefix}tokens"], words[f"min_{prefix}tokens"]


async def streamed(cluster: Foreign, **more: Any) -> tuple[list[int], str]:
    """The tokens of a stream, and its error if it ends with one."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    tokens: list[int] = []
    async for event in events_of(cluster, {**body, **more}):
        if "error" in event:
            return tokens, str(event["error"]["message"])
        tokens += [it for choice in event["choices"] for it in choice["token_ids"] or ()]
    return tokens, ""


async def events_of(cluster: Foreign, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    url = f"{cluster.base}/v1/completions"
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={**body, "stream": True}) as reply,
    ):
        assert reply.status == 200, await reply.text()
        async for line in reply.content:
            if line.startswith(b"data: ") and b"[DONE]" not in line:
                yield json.loads(line[6:])


async def test_answers_are_those_of_one_worker(backend: str, model: str) -> None:
    """Streamed or not, by text, ids and chat; P and D hear one X-Request-Id, P once.

    P's words reach D unchanged, unknown keys too (vLLM's toy proxy and its copies lose `tp_size`):
    the doubles check it. Of a hybrid model P's own token is no token of the answer.
    """
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model, backend_api_key="sesame") as cluster:
        (p,), (d,) = workers
        # A D of SGLang tells what P had cached, one of vLLM what it had itself.
        p.num_cached, d.num_cached = 2, 0 if backend == "vllm" else 2
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "return_token_ids": True}
        status, told = await cluster.post(body)
        assert status == 200
        assert told["choices"][0]["token_ids"] == answer_to(PROMPT, 5)
        # P's cached tokens are what the client sees (llm-d's sidecar).
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 2
        assert await streamed(cluster, max_tokens=7) == (answer_to(PROMPT, 7), "")
        chat: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}]}
        chat |= {"max_tokens": 3, "return_token_ids": True}
        status, told = await cluster.post(chat, "/v1/chat/completions")
        assert told["choices"][0]["token_ids"] == answer_to(prompt_of(d.requests[2]), 3)
        assert await cluster.ask(prompt="hello") == answer_to(prompt_of(d.requests[3]), 4)
        assert await cluster.outcomes("prefill") == await cluster.outcomes("decode") == {"ok": 4}
    assert len(p.requests) == len(d.requests) == 4
    for for_p, for_d in zip(p.requests, d.requests, strict=True):
        assert for_p.request_id == for_d.request_id
        assert prompt_of(for_p) == prompt_of(for_d)
        assert for_p.headers["Authorization"] == "Bearer sesame"
        assert for_p.body["stream"] is False


@pytest.mark.parametrize("is_incremental", [False, True])
async def test_sglang_streams_whole_or_new_tokens(is_incremental: bool, model: str) -> None:
    """--incremental-streaming-output: each event has the answer so far, or only what is new."""
    workers = workers_of("sglang", 1, 1)
    workers[1][0].is_incremental = is_incremental
    async with foreign_cluster(workers, model) as cluster:
        assert (await streamed(cluster, max_tokens=6))[0] == answer_to(PROMPT, 6)
        assert await logprobs_of(cluster) == answer_to(PROMPT, 4)


async def test_log_probabilities_come_with_their_tokens(model: str) -> None:
    async with foreign_cluster(workers_of("vllm", 1, 1), model) as cluster:
        assert await logprobs_of(cluster) == answer_to(PROMPT, 4)


async def logprobs_of(cluster: Foreign) -> list[int]:
    """The tokens of a stream, each with one log-probability."""
    tokens: list[int] = []
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "return_token_ids": True}
    async for event in events_of(cluster, {**body, "logprobs": 1}):
        for choice in event["choices"]:
            tokens += choice["token_ids"] or ()
            if choice["token_ids"]:
                assert choice["logprobs"]["token_logprobs"] == [-0.5] * len(choice["token_ids"])
    return tokens


@pytest.mark.parametrize(("fault", "backend"), l_shape(P_FAULTS, BACKENDS, corner=("503", "vllm")))
async def test_a_failing_p_is_replaced_and_d_has_no_blame(
    fault: str, backend: str, model: str
) -> None:
    """Hang when one request fails: sglang #24159, #29017, #29482, #40606, llm-d #2433.

    The wrong part blamed: smg #2255. A D of SGLang that nobody ended would wait for half an hour.
    """
    workers = workers_of(backend, 2, 1)
    async with foreign_cluster(workers, model) as cluster:
        bad, good = workers[0]
        bad.fault = P_FAULTS[fault]
        both = await asyncio.gather(cluster.ask(), cluster.ask(3))
        assert list(both) == [answer_to(PROMPT, 4), answer_to(PROMPT, 3)]
        assert bad.requests
        assert len(good.requests) == 2
        d = workers[1][0]
        wrong = {"504": "deadline_exceeded"}.get(fault, "failed")
        assert (await cluster.outcomes("prefill"))[wrong] >= 1
        assert (await cluster.outcomes("decode")).keys() <= {"ok", "cancelled"}
        if backend == "sglang":
            gone = [it for it in d.requests if it.end != "ok"]
            assert gone, "D had the request too"
            assert {it.body["rid"] for it in gone} <= set(d.aborted)


async def test_without_a_p_vllm_prefills_on_d_and_sglang_says_so(backend: str, model: str) -> None:
    """Two P are tried; then D computes the prompt, which a D of SGLang cannot.

    Half-dispatched after a breaker: sglang #31206. A D without a living P gets no request.
    """
    workers = workers_of(backend, 2, 1)
    async with foreign_cluster(workers, model) as cluster:
        for p in workers[0]:
            p.fault = P_FAULTS["500"]
        d = workers[1][0]
        if backend == "vllm":
            assert await cluster.ask() == answer_to(PROMPT, 4)
            assert "kv_transfer_params" not in d.requests[-1].body
            assert len(d.requests) == 1
            return
        for _ in range(6):
            assert (await cluster.refusal())[0] == 503
        # Both P rest by now.
        num_asked = len(d.requests)
        status, words = await cluster.refusal()
        assert (status, "no prefill node is available" in words) == (503, True)
        assert len(d.requests) == num_asked
        assert (await cluster.outcomes("decode")).keys() == {"cancelled"}


async def test_a_p_that_left_leaves_sglang_unready(model: str) -> None:
    workers = workers_of("sglang", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        await workers[0][0].close()
        await cluster.until_problem("cannot connect")
        status, words = await cluster.refusal()
        assert (status, "no prefill node" in words) == (503, True)
        ready, text = await fetch(f"{cluster.base}/ready")
        assert (ready, "no prefill node" in text) == (503, True)
        assert workers[1][0].requests == []


@pytest.mark.parametrize(
    ("fault", "backend"), l_shape(["503", "broken", "500"], BACKENDS, corner=("503", "vllm"))
)
async def test_a_failing_d_is_replaced_and_p_has_no_blame(
    fault: str, backend: str, model: str
) -> None:
    """smg #2255 the other way; P's part of what D lost is ended (vLLM #50425, Dynamo #13855)."""
    workers = workers_of(backend, 1, 2)
    async with foreign_cluster(workers, model) as cluster:
        bad, good = workers[1]
        bad.fault = P_FAULTS[fault]
        for _ in range(2):
            assert await cluster.ask() == answer_to(PROMPT, 4)
        assert len(good.requests) == 2
        assert bad.requests
        assert (await cluster.outcomes("prefill")).keys() <= {"ok", "cancelled"}
        assert (await cluster.outcomes("decode"))["failed"] >= 1


@pytest.mark.parametrize("backend", BACKENDS)
async def test_no_request_meets_a_connection_that_is_closing(backend: str, model: str) -> None:
    """A server may close an idle one just as a request comes, and what P holds is read once."""
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        for _ in range(3):
            assert await cluster.ask() == answer_to(PROMPT, 4)
        for (worker,) in workers:
            ports = [asked.port for asked in worker.asked]
            assert len(set(ports)) == len(ports) > 3


@pytest.mark.parametrize(
    ("place", "backend"),
    l_shape(["P", "D's first token", "D's second token"], BACKENDS, corner=("P", "vllm")),
)
async def test_who_leaves_ends_both_requests(place: str, backend: str, model: str) -> None:
    """Client gone: P computes on, and others wait (Dynamo #14507); P's blocks leak (vLLM #50425).

    The doubles see both requests end, or the cluster does not close.
    """
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        (p,), (d,) = workers
        (p if place == "P" else d).fault = Fault("hang", 1 if "second" in place else 0)
        if place == "P":
            p.fault = HUNG
        asking = asyncio.create_task(streamed(cluster))
        hanging = p if place == "P" else d

        async def hangs() -> bool:
            return any(not it.is_canary for it in hanging.open)

        await until(hangs)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        if backend == "sglang" and place == "P":
            rid = p.requests[0].body["rid"]

            async def both_hear() -> bool:
                return [p.aborted, d.aborted] == [[rid], [rid]]

            await until(both_hear)
    assert hanging.requests[0].end in ("cut", "aborted")


@pytest.mark.parametrize(
    ("fault", "backend"), l_shape(["break", "error", "end"], BACKENDS, corner=("break", "vllm"))
)
async def test_a_broken_answer_goes_on_on_another_d(fault: str, backend: str, model: str) -> None:
    """No router of the field continues a stream. The client sees the unbroken answer.

    What is left is prefilled anew: D's engine dies of parameters for other tokens (vLLM 0.32).
    """
    workers = workers_of(backend, 1, 2)
    async with foreign_cluster(workers, model) as cluster:
        once = Fault(fault, 3, times=1)
        for d in workers[1]:
            d.fault = once
        assert await streamed(cluster, max_tokens=8, min_tokens=5) == (answer_to(PROMPT, 8), "")
        asked = [it for d in workers[1] for it in d.requests]
        whole, rest = sorted(asked, key=lambda it: len(prompt_of(it)))[:2]
        assert (prompt_of(whole), limits_of(whole)) == (PROMPT, (8, 5))
        assert prompt_of(rest) == PROMPT + answer_to(PROMPT, len(prompt_of(rest)) - 3)
        assert limits_of(rest) == (8 - len(prompt_of(rest)) + 3, 5 - len(prompt_of(rest)) + 3)
        assert prompt_of(workers[0][0].requests[1]) == prompt_of(rest)
        assert sum(await metric(cluster.base, "tandem_proxy_broken_streams_total")) >= 1


@pytest.mark.parametrize("wish", ["frequency_penalty", "response_format"])
async def test_what_cannot_go_on_ends_with_an_error(wish: str, backend: str, model: str) -> None:
    """Another D would count penalties, and follow a grammar, from the wrong token."""
    wishes = {"frequency_penalty": 0.5, "response_format": {"type": "json_object"}}
    workers = workers_of(backend, 1, 2)
    async with foreign_cluster(workers, model) as cluster:
        for d in workers[1]:
            d.fault = Fault("break", 2)
        tokens, error = await streamed(cluster, max_tokens=8, **{wish: wishes[wish]})
        assert tokens == answer_to(PROMPT, 2)
        assert "the answer broke off after 2 tokens" in error
        assert sum(len(d.requests) for d in workers[1]) == 1


async def test_a_wrong_request_opens_no_breaker(backend: str, model: str) -> None:
    """4xx opens the breaker: sglang #25811, smg #2382. The client gets the worker's own words."""
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        for status in (400, 400, 413, 422):
            for worker in (*workers[0], *workers[1]):
                worker.fault = Fault(status=status)
            assert await cluster.refusal() == (400, OWN_WORDS)
        for worker in (*workers[0], *workers[1]):
            worker.fault = None
        assert await cluster.ask() == answer_to(PROMPT, 4)
        assert (await cluster.outcomes("prefill"))["ok"] == 1
        assert sum(await metric(cluster.base, "tandem_proxy_resting_nodes")) == 0


async def test_full_workers_are_full_and_not_broken(backend: str, model: str) -> None:
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        for worker in (*workers[0], *workers[1]):
            worker.fault = Fault(status=429, headers={"Retry-After": "3"})
        for _ in range(4):
            status, words = await cluster.refusal()
            assert (status, "full" in words) == (429, True)
        for worker in (*workers[0], *workers[1]):
            worker.fault = None
        assert await cluster.ask() == answer_to(PROMPT, 4)
        kinds = [await cluster.outcomes(kind) for kind in ("prefill", "decode")]
        assert all("failed" not in outcomes for outcomes in kinds)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_part_that_hangs_ends_by_its_deadline(side: str, backend: str, model: str) -> None:
    """The deadline of P's part is P's (sglang #29482); D is asked without P, or given up."""
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model, first_token_timeout=0.4) as cluster:
        hanging = workers[0 if side == "prefill" else 1][0]
        # After P's part: a D of SGLang that takes no part in it cannot be told from a late P.
        hanging.fault = HUNG if side == "prefill" else Fault("hang", 1)
        if side == "prefill" and backend == "vllm":
            assert await cluster.ask() == answer_to(PROMPT, 4)
        elif side == "prefill":
            assert (await cluster.refusal())[0] == 504
        else:
            asking = asyncio.create_task(streamed(cluster))
            await asyncio.sleep(0.5)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        other = "decode" if side == "prefill" else "prefill"
        assert (await cluster.outcomes(other)).keys() <= {"ok", "cancelled"}


async def test_p_s_answer_is_served_where_it_stopped_and_held_nothing(model: str) -> None:
    """vllm-omni #1303: P ended with `stop`, so that D would wait for blocks that are not there."""
    workers = workers_of("vllm", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        (p,), (d,) = workers
        p.gives_params, p.prefill_stops = False, True
        assert await cluster.ask() == [TOKEN_OF_P]
        assert d.requests == []


async def test_a_p_of_vllm_that_hands_nothing_over_is_no_p(model: str) -> None:
    workers = workers_of("vllm", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        workers[0][0].gives_params = False
        assert await cluster.ask() == answer_to(PROMPT, 4)
        assert (await cluster.outcomes("prefill"))["failed"] == 1


async def test_what_clients_say_of_hand_overs_reaches_no_worker(backend: str, model: str) -> None:
    """`do_remote_prefill` alone, from a client, kills the engine of a vLLM D."""
    hostile = {
        "kv_transfer_params": {"do_remote_prefill": True},
        "bootstrap_host": "10.0.0.1",
        "bootstrap_room": 1,
        "rid": "x",
    }
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **hostile}
        status, _ = await cluster.post(body)
        assert status in (200, 400)
        assert await cluster.ask() == answer_to(PROMPT, 4)
        for asked in (*workers[0][0].requests, *workers[1][0].requests):
            assert asked.body.get("bootstrap_host") in (None, "127.0.0.1")
            assert asked.body.get("rid") != "x"


async def test_sglang_drains_p_and_ends_one_that_lingers(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P's answer is read to its end, and not for ever."""
    monkeypatch.setattr(sglang, "DRAIN_S", 0.1)
    workers = workers_of("sglang", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        p = workers[0][0]
        assert await cluster.ask() == answer_to(PROMPT, 4)
        p.lingers_s = 30.0
        assert await cluster.ask() == answer_to(PROMPT, 4)

        async def is_ended() -> bool:
            return list(p.aborted) == [p.requests[1].body["rid"]]

        await until(is_ended)
    assert [it.end for it in p.requests] == ["ok", "cut"]


GARBAGE = {
    "no JSON": b"data: {\n\n",
    "no object": b"data: [1]\n\n",
    "negative id": b'data: {"choices":[{"token_ids":[-5]}],"output_ids":[-5],"meta_info":'
    b'{"completion_tokens":1}}\n\n',
    "id of text": b'data: {"choices":[{"token_ids":["a"]}],"output_ids":["a"],"meta_info":'
    b'{"completion_tokens":1}}\n\n',
    "too many": b"data: "
    + json.dumps(
        {
            "choices": [{"token_ids": [70] * 9}],
            "output_ids": [70] * 9,
            "meta_info": {"completion_tokens": 9},
        }
    ).encode()
    + b"\n\n",
    "nothing": b"",
    "endless": b"data: " + b"x" * 300_000,
    "deep": b"data: " + b"[" * 100_000 + b"\n\n",
    "no UTF-8": b'data: {"error": "\xff"}\n\n',
}


async def test_garbage_of_d_is_a_clear_error(
    backend: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No answer of a D makes a hang, a crash or a client's error."""
    monkeypatch.setattr(http_worker, "MAX_EVENT_BYTES", 2**17)
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        for name, events in GARBAGE.items():
            workers[1][0].fault = Fault("end", events=(events,))
            told = await cluster.refusal()
            assert told == (503, "no node could serve the request: try again"), name
            # A connection that ended early takes D out of use until it answers again.
            await until_status(f"{cluster.base}/ready", 200)
        workers[1][0].fault = None
        assert await cluster.ask() == answer_to(PROMPT, 4)
        assert (await cluster.outcomes("prefill")).keys() <= {"ok", "cancelled"}


async def test_garbage_of_p_is_p_s_failure(
    backend: str, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_worker, "MAX_ANSWER_BYTES", 2**17)
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        for body in (b"{", b"x" * 300_000, b"[" * 100_000):
            workers[0][0].fault = Fault(status=200, body=body)
            if backend == "vllm":
                assert await cluster.ask() == answer_to(PROMPT, 4)
            else:
                assert (await cluster.refusal())[0] == 503
        assert await cluster.outcomes("prefill") == {"failed": 3}
        assert (await cluster.outcomes("decode")).keys() <= {"ok", "cancelled"}
