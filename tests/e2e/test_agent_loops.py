"""Agents' frameworks think, call a tool and answer, on the proxy as on one node.

A grammar makes the model write what a trained one would; the letters in it are the model's.
"""

import re
import shutil
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from tests.support.api.api_double import CHATML
from tests.support.api.grammar_relay import relay_to
from tests.support.nodes.processes import Launcher

pytestmark = pytest.mark.long

THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
FLAGS = (
    *("--structured-outputs-config", '{"enable_in_reasoning": true}'),
    *("--tool-call-parser", "hermes"),
)


@pytest.fixture
async def addresses(real: Launcher) -> AsyncIterator[tuple[str, str]]:
    """Relays to a proxy before two nodes, and to one node."""
    model = real.logs / "thinking"
    shutil.copytree(real.model, model)
    (model / "chat_template.jinja").write_text(THINKS)
    thinking = replace(real, model=model)
    p, d = (thinking.launch(f"{kind}_node", *FLAGS) for kind in ("prefill", "decode"))
    for node in (p, d):
        node.wait_until_serving()
    proxy = thinking.proxy(p, d, *FLAGS)
    proxy.wait_for("tandem_proxy_available_nodes", 2)
    async with relay_to(proxy.url) as through_both, relay_to(d.url) as one_node:
        yield through_both, one_node
    for node in (p, d):
        node.assert_at_rest()


async def test_frameworks_run_their_loops_on_the_proxy_as_on_one_node(
    addresses: tuple[str, str],
) -> None:
    # Every worker of a run reads this file, and the frameworks take seconds to import.
    from tests.support.api.agent_loops import LOOPS, SHOWS_NO_THOUGHTS, Loop

    for run in LOOPS:
        seen = [Loop([], []) for _ in addresses]
        for url, loop in zip(addresses, seen, strict=True):
            await run(url, loop)
        name, loop = run.__name__, seen[0]
        assert loop == seen[1], name
        assert re.fullmatch(r"It is (sunny|warm) in [a-z]{4}\.", loop.answer), (name, loop)
        assert len(loop.cities) == 1 and loop.cities[0] in ("Rome", "Oslo"), (name, loop)
        if name not in SHOWS_NO_THOUGHTS:
            first, second = loop.thoughts
            assert re.fullmatch("[a-f]{3} [a-f]{3}", first), (name, loop)
            assert re.fullmatch("[a-f]{4}", second), (name, loop)
