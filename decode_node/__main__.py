"""`python -m decode_node MODEL ...`: one decode node in this process."""

from connector.registry import builder_of
from serving.cli import node_app
from serving.node.server import NodeServer

DEFAULT_PORT = 8200

if __name__ == "__main__":
    node_app("decode", DEFAULT_PORT, lambda config: NodeServer(config, "decode", builder_of))()
