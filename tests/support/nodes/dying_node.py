"""A decode node whose engine thread dies at SIGUSR1: run as a module, with a node's flags."""

import asyncio
import signal

from connector.registry import builder_of
from serving.cli import node_app
from serving.config import NodeConfig
from serving.node.server import NodeServer
from tests.support.nodes.engine_thread import run_in_engine


class DyingNode(NodeServer):
    """Otherwise the node of `python -m decode_node`."""

    def __init__(self, config: NodeConfig) -> None:
        super().__init__(config, "decode", builder_of)

    async def start(self) -> None:
        await super().start()
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self._die)

    def _die(self) -> None:
        self._dying = asyncio.ensure_future(run_in_engine(self.engine, _break))


def _break() -> None:
    raise AssertionError("broken on purpose")


if __name__ == "__main__":
    node_app("decode", 8200, DyingNode)()
