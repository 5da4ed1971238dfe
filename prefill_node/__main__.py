"""`python -m prefill_node MODEL ...`: one prefill node in this process."""

from engine.cli import node_app
from prefill_node.server import prefill_server

DEFAULT_PORT = 8100

if __name__ == "__main__":
    node_app("prefill", DEFAULT_PORT, prefill_server)()
