"""`python -m proxy`: the OpenAI-compatible front of a cluster of prefill and decode nodes."""

from pathlib import Path
from typing import Annotated

import typer

from engine.node.cli import run_server
from proxy.config import load_config
from proxy.routing.policy import POLICIES
from proxy.server import ProxyServer

NODE_URL = "http://host:port (its HTTP port) or grpc://host:port; repeat for several."
PURPOSE = (
    "Run the Tandem proxy: one OpenAI-compatible server in front of prefill and decode nodes. "
    "Nodes may start later; without prefill nodes the decode nodes do it all."
)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(help=PURPOSE)
def run(
    prefill: Annotated[list[str] | None, typer.Option(help=f"A prefill node: {NODE_URL}")] = None,
    decode: Annotated[list[str] | None, typer.Option(help=f"A decode node: {NODE_URL}")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(help="HTTP port, 0 for any. [8000]")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="VLLM_API_KEY", help="Key that clients must send. Default: none."),
    ] = None,
    cluster_token: Annotated[
        str | None,
        typer.Option(envvar="TANDEM_CLUSTER_TOKEN", help="Shared secret of all nodes."),
    ] = None,
    served_model_name: Annotated[
        list[str] | None, typer.Option(help="Model name(s) in the API. Default: the nodes' own.")
    ] = None,
    routing_policy: Annotated[
        str | None, typer.Option(help=f"One of {', '.join(sorted(POLICIES))}. [round_robin]")
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds that one request may take in all. [600]")
    ] = None,
    first_token_timeout: Annotated[
        float | None, typer.Option(help="Seconds until a node's first token. [120]")
    ] = None,
    inter_token_timeout: Annotated[
        float | None, typer.Option(help="Seconds between a node's tokens. [60]")
    ] = None,
    drain_timeout: Annotated[
        float | None, typer.Option(help="Seconds for running requests at the end. [30]")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="YAML whose keys are these flags; flags win.")
    ] = None,
) -> None:
    flags = {
        "prefill": prefill or None,
        "decode": decode or None,
        "host": host,
        "port": port,
        "api_key": api_key,
        "cluster_token": cluster_token,
        "served_model_name": served_model_name or None,
        "routing_policy": routing_policy,
        "request_timeout": request_timeout,
        "first_token_timeout": first_token_timeout,
        "inter_token_timeout": inter_token_timeout,
        "drain_timeout": drain_timeout,
    }
    run_server(lambda: ProxyServer(load_config(config, flags)))


if __name__ == "__main__":
    app()
