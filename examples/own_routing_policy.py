"""Gives the proxy a routing policy of its own: `python examples/own_routing_policy.py MODEL`.

MODEL is a folder such as deploy/demo/model. To run the proxy alone with it, in front of nodes that
other commands start, end this file with `server_app(ProxyConfig, ProxyServer, PURPOSE)()` as
`proxy/__main__.py` does; `--routing-policy by_length` is then one of its options.
"""

import asyncio
import sys
from collections.abc import Sequence

import aiohttp

from connector.registry import builder_of
from proxy.cluster.node import NodeView
from proxy.config import ProxyConfig
from proxy.routing.policies import POLICIES, Route
from proxy.routing.prompt import RoutedPrompt
from proxy.server import ProxyServer
from serving.config import NodeConfig
from serving.node.server import NodeServer
from serving.process import configure_logging


class ByLength:
    """Long prompts go to the last decode node, short ones to the first; no P computes them."""

    def choose(
        self, prompt: RoutedPrompt, prefill: Sequence[NodeView], decode: Sequence[NodeView]
    ) -> Route:
        """Without a P the decode node computes the prompt, too."""
        if prompt.num_tokens > 20:
            return Route(None, decode[-1], reason="long")
        return Route(None, decode[0], reason="short")


async def main(model: str) -> None:
    """Starts two decode nodes and the proxy, and prints the node that each prompt went to."""
    configure_logging("warning")
    POLICIES["by_length"] = ByLength
    config = NodeConfig(
        model=model, port=0, served_model_name=("tiny",), kv_cache_memory_bytes=64 << 20
    )
    nodes = [NodeServer(config, "decode", builder_of) for _ in range(2)]
    for node in nodes:
        await node.start()
    urls = tuple(node.url for node in nodes)
    proxy = ProxyServer(
        ProxyConfig(decode=urls, port=0, routing_policy="by_length", enable_routing_details=True)
    )
    await proxy.start()
    while proxy.missing():  # noqa: ASYNC110 - until it knows both nodes
        await asyncio.sleep(0.1)
    async with aiohttp.ClientSession(proxy.url) as client:
        for prompt in ("Mia", "Mia " * 50):
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 8}
            async with client.post("/v1/completions", json=body) as reply:
                print((await reply.json())["usage"]["routing"])
    await proxy.close()
    for node in nodes:
        await node.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
