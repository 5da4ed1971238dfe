"""Two P, two D and a proxy as processes: conversations go where their prefixes are."""

import asyncio
import urllib.request
from collections.abc import Mapping

import pytest
from prometheus_client.parser import text_string_to_metric_families

from proxy.routing.in_flight import LINGER_S
from tests.support.api.chats import DEMO_MODEL, Chat, run_chats
from tests.support.nodes.asking import Answer
from tests.support.nodes.processes import Launcher, ServerProcess

NUM_CHATS = 9
NUM_QUESTIONS = 4
EVENTS = (
    *("--enable-prefix-caching", "--kv-events-config", '{"enable_kv_cache_events": true}'),
    *("--max-num-batched-tokens", "256"),
)
# D holds what the conversations that stay with it need, not all nine.
ON_P = (*EVENTS, "--kv-cache-memory-bytes", str(12 << 20))
ON_D = (*EVENTS, "--kv-cache-memory-bytes", str(7 << 20))
MORE = "Who has the map?"


@pytest.fixture
def demo(real: Launcher) -> Launcher:
    """Starts nodes of the demo model."""
    real.model = DEMO_MODEL
    return real


@pytest.mark.long
async def test_conversations_stay_where_their_prefixes_are(demo: Launcher) -> None:
    expected = await answers_of_one_node(demo)
    hits = {}
    for policy in ("round_robin", "prefix_aware"):
        nodes = start_nodes(demo)
        proxy = start_proxy(demo, nodes, "--routing-policy", policy)
        await run_chats(proxy.url, f"warm up for {policy}", 4, 1)
        # One at a time: with more, round robin meets its own prefixes by luck, now and then.
        chats = await run_chats(proxy.url, policy, NUM_CHATS, NUM_QUESTIONS, at_once=1)
        assert [chat.answers for chat in chats] == expected
        hits[policy] = hit_tokens(proxy)
        for server in (proxy, *reversed(nodes)):
            server.stop()
    assert hits["prefix_aware"]["decode"] >= 2 * hits["round_robin"]["decode"], hits
    assert hits["prefix_aware"]["prefill"] > hits["round_robin"]["prefill"], hits


async def test_the_index_is_right_again_after_a_decode_node_and_the_proxy_were_killed(
    demo: Launcher,
) -> None:
    nodes = start_nodes(demo)
    expected = await answers_of_one_node(demo)
    proxy = start_proxy(demo, nodes)
    asking = asyncio.create_task(run_chats(proxy.url, "s", NUM_CHATS, NUM_QUESTIONS))
    await asyncio.to_thread(until_answers, proxy, 10)
    nodes[-1].kill()
    again = launch_again(demo, nodes[-1], "decode_node", *ON_D)
    await asyncio.to_thread(until_answers, proxy, 15)
    proxy.kill()
    nodes[-1] = again.wait_until_serving()
    proxy = start_proxy(demo, nodes, "--port", str(proxy.port))
    chats = await asking
    assert [chat.answers for chat in chats] == expected
    proxy.wait_for("tandem_proxy_kv_events_is_synced", 4)
    await asyncio.sleep(LINGER_S)  # from now on only events tell what the nodes hold
    for chat in chats:
        assert_as_expected(await chat.ask(proxy.url, MORE, "s"))
    hits = hit_tokens(proxy)
    assert hits["prefill"] and hits["decode"]


def assert_as_expected(answer: Answer) -> None:
    """The nodes had what the proxy counted on, and hardly more."""
    usage = answer.body["usage"]
    route, moved = usage["routing"], usage["kv_transfer"]
    assert route["decode_hit_tokens"] == moved["decode_cached_tokens"], usage
    # A state inside a hash block counts only with attention beyond it.
    found = moved["prefill_cached_tokens"]
    assert found - 16 <= route["prefill_hit_tokens"] <= found, usage


def start_nodes(demo: Launcher) -> list[ServerProcess]:
    nodes = [demo.launch("prefill_node", *ON_P) for _ in range(2)]
    nodes += [demo.launch("decode_node", *ON_D) for _ in range(2)]
    return [node.wait_until_serving() for node in nodes]


def start_proxy(demo: Launcher, nodes: list[ServerProcess], *flags: str) -> ServerProcess:
    p1, p2, d1, d2 = nodes
    others = ("--prefill", p2.url, "--decode", d2.url)
    proxy = demo.proxy(p1, d1, *others, "--enable-routing-details", *flags)
    proxy.wait_for("tandem_proxy_available_nodes", 4)
    return proxy


def launch_again(demo: Launcher, lost: ServerProcess, kind: str, *flags: str) -> ServerProcess:
    return demo.launch(kind, *flags, "--port", str(lost.port))


async def answers_of_one_node(demo: Launcher) -> list[list[list[int]]]:
    alone = demo.node("prefill_node", "--max-num-batched-tokens", "256")
    chats: list[Chat] = await run_chats(alone.url, "alone", NUM_CHATS, NUM_QUESTIONS)
    alone.stop()
    return [chat.answers for chat in chats]


def until_answers(proxy: ServerProcess, count: int) -> None:
    """Waits until the proxy has sent so many whole answers."""
    proxy.wait_for_at_least("vllm:request_success_total", count)


def hit_tokens(proxy: ServerProcess) -> Mapping[str, float]:
    """By kind of node."""
    with urllib.request.urlopen(f"{proxy.url}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        sample.labels["kind"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "tandem_proxy_hit_tokens_total"
    }
