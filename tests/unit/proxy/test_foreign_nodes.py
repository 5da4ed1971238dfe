"""Workers of vLLM and SGLang as nodes: which of them serve, and what is said of those that do not.

Each test names the complaint about another router that it answers, as repository and number.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from engine.errors import ConfigError, InvalidRequestError
from proxy.backends.sglang_facts import ServerInfo
from proxy.backends.sglang_generate import constraint
from proxy.backends.worker_facts import Metrics, sources_of
from proxy.cluster.node_pool import POLL_INTERVAL_S
from proxy.config import ProxyConfig
from serving.api.structured_output import (
    GrammarFields,
    ResponseFormat,
    StructuredOutputs,
    grammar_of,
)
from serving.config import load_config
from serving.rpc.node_http import parse_node_url
from serving.rpc.registration import Introduction, Registration
from tests.support.api.node_double import ScriptedNode, fetch, running_nodes, until, until_status
from tests.support.workers.foreign_cluster import PROMPT, Foreign, foreign_cluster, workers_of
from tests.support.workers.worker_double import Fault, answer_to

pytestmark = pytest.mark.usefixtures("quick")

ADDRESS = "127.0.0.1:9"


@asynccontextmanager
async def registered(kind: str, url: str, base: str) -> AsyncIterator[None]:
    """A worker that `tandem register` makes known, until the block ends."""
    registration = Registration(Introduction(url, kind, url), token=None, tls=None)
    registration.register_with([base])
    try:
        yield
    finally:
        await registration.leave()


def num_canaries(worker: Any) -> int:
    return sum(it.is_canary for it in worker.asked)


async def until_canaries(worker: Any, more_than: int) -> None:
    async def are_there() -> bool:
        return num_canaries(worker) > more_than

    await until(are_there)


async def until_served(cluster: Foreign) -> None:
    """Waits until all nodes serve."""

    async def do_all() -> bool:
        return all(node["stage"] == "serving" for node in await cluster.nodes())

    await until(do_all)


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        ("vllm+http://" + ADDRESS, "grpc://127.0.0.1:8"),
        ("vllm+http://" + ADDRESS, "sglang+http://127.0.0.1:8"),
        ("http://127.0.0.1:8", "sglang+http://" + ADDRESS),
    ],
)
def test_nodes_of_two_engines_are_refused_by_name(prefill: str, decode: str) -> None:
    with pytest.raises(ConfigError, match="cannot take each other's prefills") as caught:
        load_config(ProxyConfig, None, {"prefill": (prefill,), "decode": (decode,), "port": 0})
    assert all(it.rpartition("+")[2] in str(caught.value) for it in (prefill, decode))


async def test_a_node_of_another_engine_may_not_join(backend: str, model: str) -> None:
    workers = workers_of(backend, 1, 1)
    stranger = ScriptedNode("d")
    async with (
        running_nodes(stranger),
        foreign_cluster(workers, model, grpc_port=0) as cluster,
        registered("decode", stranger.url, cluster.base),
    ):
        await cluster.until_problem(f"is a tandem worker where this cluster's are {backend}")
        for _ in range(3):
            assert await cluster.ask() == answer_to(PROMPT, 4)
    assert stranger.requests == []


async def test_workers_may_register_and_leave(backend: str, model: str) -> None:
    workers = workers_of(backend, 1, 2)
    (p,), (d, more) = workers
    async with foreign_cluster(([p], [d]), model, grpc_port=0) as cluster:
        await more.start()
        async with registered("decode", more.url, cluster.base):
            await until_canaries(more, 0)
            await until_served(cluster)
            assert len(await cluster.nodes()) == 3

        async def is_gone() -> bool:
            return len(await cluster.nodes()) == 2

        await until(is_gone)
        await more.close()


async def test_a_pair_that_moves_no_keys_never_serves(backend: str, model: str) -> None:
    """PD "worked", and no key ever moved: smg #1622. InferenceX #2255: one real generation first.

    A D of vLLM then computes each prompt itself, which no answer tells: its counter does.
    """
    workers = workers_of(backend, 1, 1)
    workers[1][0].moves_keys = False
    num_used = 1 if backend == "vllm" else 0
    async with foreign_cluster(workers, model, num_used=num_used) as cluster:
        await cluster.until_problem("cannot pull from" if backend == "vllm" else "moves no keys")
        ready, _ = await fetch(f"{cluster.base}/ready")
        assert ready == (200 if backend == "vllm" else 503)
        if backend == "vllm":
            assert await cluster.ask() == answer_to(PROMPT, 4)
        assert workers[0][0].requests == []


async def test_a_vllm_without_statistics_proves_no_pull_and_tells_its_load(model: str) -> None:
    workers = workers_of("vllm", 1, 1)
    for worker in (workers[0][0], workers[1][0]):
        worker.has_stats = False
    async with foreign_cluster(workers, model, num_used=1) as cluster:
        await cluster.until_problem("--disable-log-stats")
        workers[1][0].fault = Fault()
        asking = asyncio.create_task(cluster.ask())

        async def is_told() -> bool:
            return any(it["info"]["num_requests_running"] for it in await cluster.nodes())

        await until(is_told)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_role_that_was_switched_is_no_longer_ready(side: str, model: str) -> None:
    """A role replaced after its stable name stays Ready, the pair dead: sglang #33789, #34289.

    Also after /pd_role_switch. A request would wait for a P that is none.
    """
    workers = workers_of("sglang", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        switched = workers[0 if side == "prefill" else 1][0]
        before = num_canaries(switched)
        switched.mode = "decode" if side == "prefill" else "prefill"
        await cluster.until_problem(f"plays the part '{switched.mode}', and is named as a {side}")
        assert (await cluster.refusal())[0] == 503
        assert (await fetch(f"{cluster.base}/ready"))[0] == 503
        switched.mode = ""
        await until_canaries(switched, before)
        await until_served(cluster)
        assert await cluster.ask() == answer_to(PROMPT, 4)


async def test_a_vllm_that_took_p_s_name_and_hands_nothing_over_is_found(model: str) -> None:
    """sglang #33789 for vLLM, which tells no role: its first canary fails."""
    workers = workers_of("vllm", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        p = workers[0][0]
        p.gives_params, p.life = False, 2
        await cluster.until_problem("handed nothing over")
        assert await cluster.ask() == answer_to(PROMPT, 4)
        assert p.requests == []


@pytest.mark.parametrize("side", [0, 1], ids=["P", "D"])
async def test_a_restart_is_another_life(side: int, backend: str, model: str) -> None:
    """A dead P that looks alive: sglang #31206. Each life serves after a canary of its own."""
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        worker = workers[side][0]
        before = num_canaries(worker)
        worker.life += 1
        await until_canaries(worker, before)
        await until_served(cluster)
        assert await cluster.ask() == answer_to(PROMPT, 4)


async def test_an_unhealthy_worker_gets_nothing_until_it_is_well(backend: str, model: str) -> None:
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        workers[1][0].health = 503
        await cluster.until_problem("answers 503")
        assert (await cluster.refusal())[0] == 503
        workers[1][0].health = 200
        await until_status(f"{cluster.base}/ready", 200)
        assert await cluster.ask() == answer_to(PROMPT, 4)
        assert len(workers[1][0].requests) == 1


async def test_sglang_of_before_ready_is_asked_for_its_health(model: str) -> None:
    workers = workers_of("sglang", 1, 1)
    workers[0][0].has_ready = workers[1][0].has_ready = False
    async with foreign_cluster(workers, model) as cluster:
        assert await cluster.ask() == answer_to(PROMPT, 4)


async def test_a_worker_of_another_model_is_refused_by_name(backend: str, model: str) -> None:
    workers = workers_of(backend, 1, 2)
    async with foreign_cluster(workers, model) as cluster:
        workers[1][1].model, workers[1][1].life = "other", 2
        await cluster.until_problem("serves model 'other'")
        for _ in range(3):
            assert await cluster.ask() == answer_to(PROMPT, 4)
        assert workers[1][1].requests == []


async def test_pages_that_make_no_sense_are_a_problem(backend: str, model: str) -> None:
    workers = workers_of(backend, 1, 1)
    async with foreign_cluster(workers, model) as cluster:

        async def is_away() -> bool:
            return any(node["problem"] for node in await cluster.nodes())

        for page in (b"", b"{", b"[" * 100_000, b"\xff\xfe", b'{"data": [{"id": 1}]}'):
            workers[1][0].page = page
            await until(is_away)
            workers[1][0].page = None
            await until_served(cluster)
        assert await cluster.ask() == answer_to(PROMPT, 4)


async def test_after_a_number_that_is_none_the_worker_is_still_watched(model: str) -> None:
    workers = workers_of("vllm", 1, 1)
    worker = workers[1][0]
    async with foreign_cluster(workers, model) as cluster:
        started = b"process_start_time_seconds %d" % (1.7e9 + worker.life)
        worker.page = started + b"\nvllm:num_requests_running +Inf\n"
        await asyncio.sleep(1.5 * POLL_INTERVAL_S)
        # A proxy that has stopped to watch its nodes ends itself.
        worker.page, worker.health = None, 503
        await cluster.until_problem("answers 503")


def test_numbers_are_counts_or_not_there() -> None:
    for number in ("+Inf", "-Inf", "NaN", "1e308", "-5"):
        assert not Metrics(f"a {number}\n".encode(), frozenset({"a"})).has("a")
    assert Metrics(b'a{b="c"} 2.5e3\n', frozenset({"a"})).total("a", 'b="c"') == 2500


def test_lies_about_events_name_no_source() -> None:
    url = parse_node_url("http://127.0.0.1:8100")
    on = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    assert [it.endpoint for it in sources_of(url, msgspec.json.encode({"0": on}))] == [
        "tcp://127.0.0.1:5557"
    ]
    for lie in ({"replay_endpoint": 7}, {"replay_endpoint": "x"}, {"topic": 3}, {"endpoint": 5}):
        assert sources_of(url, msgspec.json.encode({"0": {**on, **lie}})) == []


async def test_d_s_word_of_a_lost_transfer_is_p_s_failure(model: str) -> None:
    """smg #2255: D may hear of P's end before the proxy does."""
    workers = workers_of("sglang", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        (p,), (d,) = workers
        p.fault, p.lingers_s = Fault("break", 0), 0.1
        told = {"error": {"message": "Decode transfer failed for request rank=0", "code": 500}}
        d.fault = Fault("end", 0, events=(b"data: " + json.dumps(told).encode() + b"\n\n",))
        assert (await cluster.refusal())[0] == 503
        assert (await cluster.outcomes("prefill")).keys() == {"failed"}
        assert (await cluster.outcomes("decode")).keys() == {"cancelled"}


async def test_what_sglang_cannot_do_is_said_by_name(model: str) -> None:
    wishes: list[tuple[dict[str, Any], str]] = [
        ({"bad_words": ["hello"]}, "bad_words"),
        ({"allowed_token_ids": [70, 71]}, "allowed_token_ids"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"repetition_penalty": 3.0}, "repetition_penalty"),
        ({"guided_grammar": "start: /a/ | rule\nrule: /b/"}, "structured_outputs"),
    ]
    workers = workers_of("sglang", 1, 1)
    async with foreign_cluster(workers, model) as cluster:
        for wish, param in wishes:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, **wish}
            status, told = await cluster.post(body)
            assert (status, told["error"]["param"]) == (400, param)
        assert workers[0][0].requests == workers[1][0].requests == []


def test_grammars_are_said_in_sglang_s_words() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    asked = ResponseFormat(type="json_schema", schema_=schema)
    told = json.loads(constraint(grammar_of(GrammarFields(response_format=asked)))["json_schema"])
    assert told["properties"]["a"]["type"] == "string"
    assert "x-guidance" not in told
    assert constraint(grammar_of(GrammarFields(regex="a/b[x/]{2}"))) == {"regex": "a/b[x/]{2}"}
    choice = StructuredOutputs(choice=["yes", 'n"o'])
    assert constraint(grammar_of(GrammarFields(structured_outputs=choice))) == {
        "ebnf": r'root ::= "yes" | "n\"o"'
    }
    with pytest.raises(InvalidRequestError, match="no Lark grammar"):
        constraint(grammar_of(GrammarFields(grammar="start: a\na: /x/")))


def test_sglang_tells_where_its_events_are() -> None:
    """The port of its host, not the wildcard that it binds; ranks are not mixed up."""
    told = {
        "publisher": "zmq",
        "endpoint_host": "*",
        "endpoint_port_base": 5557,
        "replay_endpoint_port_base": 5600,
        "block_size": 64,
        "dp_size": 1,
    }
    url = parse_node_url("http://10.0.0.7:30000")
    info = msgspec.convert({"kv_events": told}, ServerInfo).events_at(url, None, "m")
    assert info is not None
    assert (info.endpoint, info.replay_endpoint) == ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5600")
    assert (info.hash_block_size, info.publisher) == (64, "sglang")
    assert [group.kind for group in info.groups] == ["full_attention"]
    ranks = msgspec.convert({"kv_events": told | {"dp_size": 2}}, ServerInfo)
    assert ranks.events_at(url, None, "m") is None
