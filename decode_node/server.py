"""A decode node: the shared node server with the PD connector."""

from connector.factory import build_connector
from engine.config import NodeConfig
from engine.node.server import NodeServer


def decode_server(config: NodeConfig) -> NodeServer:
    """The server of one decode node; it also serves plain requests, and prefills when asked to."""
    return NodeServer(config, "decode", build_connector)
