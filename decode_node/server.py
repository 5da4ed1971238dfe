"""A decode node: the shared node server with the connectors of `connector/`."""

from connector.registry import builder_of
from engine.config import NodeConfig
from engine.node.server import NodeServer


def decode_server(config: NodeConfig) -> NodeServer:
    """The server of one decode node; it also serves plain requests, and prefills when asked to."""
    return NodeServer(config, "decode", builder_of)
