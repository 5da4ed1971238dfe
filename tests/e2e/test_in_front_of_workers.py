"""The proxy's backend for vLLM, in front of real nodes of ours, whose HTTP speaks vLLM's words.

Hand-overs, Mamba states, events and deaths are real; what vLLM does otherwise, doubles do
(`tests/unit/proxy/test_foreign_workers.py`).
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.nodes.asking import ask, question, stream, streamed_ids
from tests.support.nodes.cluster import until
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import Launcher, ServerProcess

CASES: tuple[dict[str, Any], ...] = (
    {},
    {"logprobs": 2},
    {"max_tokens": 1},
    {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5},
    {"structured_outputs": {"regex": "([a-f]{3}[0-9]{2}-)+"}},
)
ALONE_ON_D = {"prompt_logprobs": 1, "max_tokens": 2}
BROKEN = "tandem_proxy_broken_streams_total"
PULLS = "vllm:nixl_bytes_transferred_count"


@pytest.mark.long
async def test_workers_over_http_answer_are_routed_to_and_may_die(
    real: Launcher, tmp_path: Path
) -> None:
    kinds = ("prefill_node", "decode_node", "decode_node")
    places = [(f"ipc://{tmp_path}/{place}", f"ipc://{tmp_path}/{place}r") for place in range(3)]
    launched = [
        real.launch(kind, "--enable-prefix-caching", "--kv-events-config", events_at(*place))
        for kind, place in zip(kinds, places, strict=True)
    ]
    p, d, other = nodes = [each.wait_until_serving() for each in launched]
    told = [
        word
        for node, (endpoint, replay) in zip(nodes, places, strict=True)
        for word in ("--kv-events-endpoint", f"{node.url}={endpoint},{replay}")
    ]
    backend = ("--backend", "vllm", "--tokenizer", str(real.model), "--enable-routing-details")
    proxy = real.proxy(p, d, "--decode", other.url, *backend, *told)
    proxy.wait_for("tandem_proxy_available_nodes", 3)
    await answers_are_those_of_one_node(proxy, p, (d, other))
    await a_prompt_goes_where_it_is_cached(proxy)
    await answers_go_on_elsewhere(proxy, p, (d, other))


def events_at(endpoint: str, replay: str) -> str:
    config = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    return json.dumps(config)


async def answers_are_those_of_one_node(
    proxy: ServerProcess, p: ServerProcess, ds: tuple[ServerProcess, ...]
) -> None:
    before = sum(d.metrics()[PULLS] for d in ds)
    for place, changes in enumerate((*CASES, ALONE_ON_D)):
        body = question(list(prompt_of(90, salt=place)), **changes)
        alone = (await ask(p.url, body)).body["choices"]
        assert (await ask(proxy.url, body)).body["choices"] == alone, changes
    # vLLM's P leaves a prompt's last row out, so D computes the log-probabilities of a prompt.
    # Nor does D pull for an answer of one token, which P has given.
    assert sum(d.metrics()[PULLS] for d in ds) == before + len(CASES) - 1


async def a_prompt_goes_where_it_is_cached(proxy: ServerProcess) -> None:
    """Events of a hybrid that give no hits send all to one worker: Infera #98."""
    prompt = list(prompt_of(200, salt=77))
    first = (await ask(proxy.url, question(prompt))).body["usage"]["routing"]
    for length in (150, 200):
        # By then the events of the first one have come, and nothing else says so.
        await asyncio.sleep(6.0)
        routing = (await ask(proxy.url, question([*prompt[:length], 5, 6]))).body["usage"][
            "routing"
        ]
        assert routing["reason"] == "prefix"
        assert routing["decode"] == first["decode"]
        assert routing["decode_hit_tokens"] >= length - 32
    # The state after the whole first prompt is found as well, and not only its attention.
    assert routing["prefill_hit_tokens"] >= 192


async def answers_go_on_elsewhere(
    proxy: ServerProcess, p: ServerProcess, ds: tuple[ServerProcess, ...]
) -> None:
    bodies = [question(list(prompt_of(40, salt=99 + n)), max_tokens=350) for n in range(6)]
    alone = [(await ask(p.url, body)).token_ids for body in bodies]
    heard: list[list[dict[str, Any]]] = [[] for _ in bodies]
    asking = [
        asyncio.create_task(stream(proxy.url, {**body, "stream": True}, events))
        for body, events in zip(bodies, heard, strict=True)
    ]
    await until(lambda: all(map(streamed_ids, heard)))
    # Prompts that share nothing spread over both, so some answers are on this one.
    ds[0].kill()
    await asyncio.gather(*asking)
    assert list(map(streamed_ids, heard)) == alone
    assert proxy.metrics()[BROKEN] >= 1
