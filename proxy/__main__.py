"""`python -m proxy`: the OpenAI-compatible front of a cluster of prefill and decode nodes."""

from typing import Annotated

import typer

from proxy.config import ProxyConfig

NODE_URL_HELP = "http://host:port (the node's HTTP port) or grpc://host:port; repeat for several."

app = typer.Typer(add_completion=False)


def _default(name: str) -> str:
    return f"[default: {getattr(ProxyConfig(), name)}]"


@app.command()
def main(
    ctx: typer.Context,
    prefill: Annotated[
        list[str] | None, typer.Option(help="Prefill node: " + NODE_URL_HELP)
    ] = None,
) -> None:
    """x"""
