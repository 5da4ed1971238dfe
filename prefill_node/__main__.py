"""`python -m prefill_node MODEL ...`: one prefill node in this process."""

from connector.registry import builder_of
from serving.cli import node_app
from serving.node.server import NodeServer

DEFAULT_PORT = 8100

if __name__ == "__main__":
    node_app("prefill", DEFAULT_PORT, lambda config: NodeServer(config, "prefill", builder_of))()
