"""P and D that do not fit, behind a proxy: right tokens, one log line, little work in vain."""

import json
import time

from tests.support.nodes.asking import ask, get, question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import Launcher, ServerProcess

QUESTIONS = 12


def lines_of(server: ServerProcess, event: str) -> list[str]:
    lines = [line for line in server.said.splitlines() if line.startswith("{")]
    return [line for line in lines if json.loads(line)["event"].startswith(event)]


async def test_prompts_are_not_computed_twice_in_silence(real: Launcher) -> None:
    seeds = [("--prefix-hash-seed", seed) for seed in ("one", "another")]
    p = real.launch("prefill_node", *seeds[0])
    d = real.launch("decode_node", *seeds[1])
    proxy = real.proxy(p.wait_until_serving(), d.wait_until_serving())
    asked = [question(list(prompt_of(40, salt=number))) for number in range(2)]
    wanted = [(await ask(d.url, each)).token_ids for each in asked]
    assert (await get(d.url, "/ready")).body == {"status": "ready", "reasons": []}

    assert (await ask(proxy.url, asked[0])).token_ids == wanted[0]
    deadline = time.monotonic() + 30
    while (said := (await get(proxy.url, "/ready")).body)["status"] != "degraded":
        assert time.monotonic() < deadline, said
    began = p.metrics()["vllm:prompt_tokens_total"]
    for _ in range(QUESTIONS):
        assert (await ask(proxy.url, asked[1])).token_ids == wanted[1]

    for server in (proxy, d):
        answer = await get(server.url, "/ready")
        assert answer.status == 200
        (reason,) = answer.body["reasons"]
        assert "fail" in reason
        assert "peer_does_not_fit" in reason
    assert p.metrics()["vllm:prompt_tokens_total"] <= began + 2 * 40  # a try every some seconds
    assert proxy.metrics()["tandem_proxy_local_prefills_total"] >= QUESTIONS - 2
    assert 1 <= d.metrics()["tandem:kv_hand_over_failures_total"] <= 3
    for server, event in ((d, "a hand-over failed"), (proxy, "a pair of nodes is not used")):
        (line,) = lines_of(server, event)
        assert "prefix_hash_seed is " in line
