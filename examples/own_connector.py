"""Gives a node a KV connector of its own: `python examples/own_connector.py MODEL`.

MODEL is a folder such as deploy/demo/model. This one tells what the prefix cache stores and moves
no bytes. One that loads overrides more verbs of `engine/kv_connector.py`;
`tests/support/cache/dictionary_connector.py` is the smallest one that does.
"""

import asyncio
import sys

from connector.registry import CONNECTORS, builder_of
from engine.kv_cache.listener import Cached
from engine.kv_connector import Connector, LocalAdmission, SchedulerConnector, WorkerConnector
from engine.types import GenerateRequest, SamplingParams, TokenId
from serving.config import KVTransferConfig, NodeConfig
from serving.node.connector import Build, BuilderOf, NodeConnector
from serving.node.server import NodeServer
from serving.process import configure_logging


class TellingScheduler(SchedulerConnector):
    """Prints what can be found in the cache; runs in the engine thread, so calls must be short."""

    def __init__(self) -> None:
        self.cache_listener = self

    def stored(
        self, cached: Cached, parent: bytes, tokens: tuple[TokenId, ...], *, cache_salt: str | None
    ) -> None:
        """`tokens` end at `cached.end`; their digests start from the one called `parent`."""
        print(f"stored: {type(cached).__name__}, {len(tokens)} tokens up to {cached.end}")

    def removed(self, cached: Cached) -> None:
        """Evicted."""
        print(f"removed: {type(cached).__name__} up to {cached.end}")


class TellingConnector(NodeConnector):
    """A node without peers, whose scheduler side listens."""

    def __init__(self) -> None:
        self.connector = Connector(LocalAdmission(), TellingScheduler(), WorkerConnector())

    @classmethod
    def builder(cls, config: KVTransferConfig, builder_of: BuilderOf, /) -> Build:
        """Checks the options in `config`, here none; the call gets the node's arena and more."""
        return lambda node: cls()


async def main(model: str) -> None:
    """Starts a node with this connector and asks it for 8 tokens."""
    configure_logging("warning")
    CONNECTORS["TellingConnector"] = TellingConnector
    chosen = KVTransferConfig(kv_connector="TellingConnector")
    config = NodeConfig(
        model=model, port=0, kv_cache_memory_bytes=64 << 20, kv_transfer_config=chosen
    )
    node = NodeServer(config, "decode", builder_of)
    await node.start()
    sampling = SamplingParams(max_tokens=8, temperature=0.0)
    request = GenerateRequest(
        request_id="1", prompt_token_ids=tuple(range(2, 66)), sampling=sampling
    )
    async for output in node.engine.generate(request):
        print("generated:", output.token_ids)
    await node.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
