"""`python -m proxy`: the OpenAI-compatible front of a cluster of prefill and decode nodes."""

from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from serving.cli import server_app

PURPOSE = (
    "Run the Tandem proxy: one OpenAI-compatible server in front of prefill and decode nodes. "
    "Nodes may start later; without prefill nodes the decode nodes do it all."
)

if __name__ == "__main__":
    server_app(ProxyConfig, ProxyServer, PURPOSE)()
