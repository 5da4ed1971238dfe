"""`python -m decode_node MODEL ...`: one decode node in this process."""

from decode_node.server import decode_server
from engine.cli import node_app

DEFAULT_PORT = 8200

if __name__ == "__main__":
    node_app("decode", DEFAULT_PORT, decode_server)()
