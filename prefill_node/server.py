"""A prefill node: the shared node server with the connectors of `connector/`."""

from connector.registry import builder_of
from engine.config import NodeConfig
from engine.node.server import NodeServer


def prefill_server(config: NodeConfig) -> NodeServer:
    """The server of one prefill node; it also serves plain requests, and decodes when asked to."""
    return NodeServer(config, "prefill", builder_of)
