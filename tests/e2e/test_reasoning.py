"""Thoughts of a real model through real servers: a grammar makes it think, close and answer.

The oracle is the same chat on one node that nobody disturbs.
"""

import asyncio
import shutil
from dataclasses import replace
from typing import Any

import pytest

from tests.support.api.api_double import CHATML
from tests.support.nodes.asking import CHAT, ask, stream
from tests.support.nodes.cluster import until
from tests.support.nodes.processes import Launcher

THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
BINDS_THOUGHTS = ("--structured-outputs-config", '{"enable_in_reasoning": true}')
CASES = {
    "short thoughts": "[a-f]{3}</think>([a-f]{3} ){60}",
    "long thoughts": "([a-f]{3} ){60}\n</think>\n\n[a-f]{3}",
    "thoughts that stay open": "([a-f]{3} ){60}",
}
USABLE = "tandem_proxy_available_nodes"
BROKEN = "tandem_proxy_broken_streams_total"


def asked(pattern: str) -> dict[str, Any]:
    """A seeded chat whose whole output, thoughts too, is what `pattern` allows."""
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "What is it?"}],
        "max_tokens": 300,
        "temperature": 1.0,
        "seed": 7,
        "structured_outputs": {"regex": pattern},
    }


def told(events: list[dict[str, Any]]) -> tuple[str, str]:
    """The thoughts and the answer of a stream."""
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    thoughts = "".join(delta.get("reasoning") or "" for delta in deltas)
    assert thoughts == "".join(delta.get("reasoning_content") or "" for delta in deltas)
    return thoughts, "".join(delta.get("content") or "" for delta in deltas)


@pytest.mark.long
async def test_thoughts_stay_thoughts_when_their_d_is_killed(real: Launcher) -> None:
    model = real.logs / "thinking"
    shutil.copytree(real.model, model)
    (model / "chat_template.jinja").write_text(THINKS)
    thinking = replace(real, model=model)
    kinds = ("prefill", "decode", "decode")
    p, d, d2 = (thinking.launch(f"{kind}_node", *BINDS_THOUGHTS) for kind in kinds)
    for node in (p, d, d2):
        node.wait_until_serving()
    routed = ("--decode", d2.url, "--routing-policy", "round_robin")
    proxy = thinking.proxy(p, d, *routed, *BINDS_THOUGHTS)
    proxy.wait_for(USABLE, 3)
    alone: dict[str, tuple[str, str]] = {}
    for name, pattern in CASES.items():
        answers = [await ask(url, asked(pattern), path=CHAT) for url in (d2.url, proxy.url)]
        assert [answer.status for answer in answers] == [200, 200], answers
        one_node, both = (answer.body for answer in answers)
        message = one_node["choices"][0]["message"]
        assert both["choices"][0]["message"] == message, name
        num_thoughts = one_node["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert both["usage"]["completion_tokens_details"]["reasoning_tokens"] == num_thoughts > 0
        assert message["reasoning"] == message["reasoning_content"]
        alone[name] = message["reasoning"], message["content"] or ""
    assert len(alone["short thoughts"][0]) == len(alone["long thoughts"][1]) == 3
    assert alone["thoughts that stay open"][1] == ""
    # Twice each, one after the other, so that about half of them is on the node that dies.
    running: list[tuple[str, list[dict[str, Any]], asyncio.Task[Any]]] = []
    for name in (*CASES, *CASES):
        events: list[dict[str, Any]] = []
        body = {**asked(CASES[name]), "stream": True}
        task = asyncio.create_task(stream(proxy.url, body, events, path=CHAT))
        running.append((name, events, task))
    await until(lambda: all(len(events) > 3 for _, events, _ in running))
    d.kill()
    for name, events, task in running:
        await task
        assert told(events) == alone[name], name
    assert proxy.metrics()[BROKEN] > 0
    for node in (p, d2):
        node.assert_at_rest()
