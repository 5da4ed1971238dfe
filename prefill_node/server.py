"""A prefill node: the shared node server with the PD connector."""

from connector.factory import build_connector
from engine.config import NodeConfig
from engine.node.server import NodeServer


def prefill_server(config: NodeConfig) -> NodeServer:
    """The server of one prefill node; it also serves plain requests, and decodes when asked to."""
    return NodeServer(config, "prefill", build_connector)
