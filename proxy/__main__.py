"""`python -m proxy`: the OpenAI-compatible front of a cluster of prefill and decode nodes."""

from typing import Annotated

import typer

from engine.flags import (
    ApiKey,
    ClusterToken,
    ConfigFile,
    DrainTimeout,
    Host,
    PromptTokensDetails,
    ServedModelName,
    SslCaCerts,
    SslCertfile,
    SslKeyfile,
    given_flags,
)
from engine.process import run_server
from proxy.config import load_config
from proxy.routing.policies import POLICIES
from proxy.server import ProxyServer

NODE_URL = (
    "http://host:port (its HTTP port) or grpc://host:port, with TLS https:// or grpcs://; repeat "
    "for several."
)
PURPOSE = (
    "Run the Tandem proxy: one OpenAI-compatible server in front of prefill and decode nodes. "
    "Nodes may start later; without prefill nodes the decode nodes do it all."
)

Seconds = float | None
Prefill = Annotated[list[str] | None, typer.Option(help=f"A prefill node: {NODE_URL}")]
Decode = Annotated[list[str] | None, typer.Option(help=f"A decode node: {NODE_URL}")]
Port = Annotated[int | None, typer.Option(help="HTTP port, 0 for any. [8000]")]
Policy = Annotated[
    str | None, typer.Option(help=f"One of {', '.join(sorted(POLICIES))}. [round_robin]")
]
Whole = Annotated[Seconds, typer.Option(help="Seconds that one request may take in all. [600]")]
FirstToken = Annotated[Seconds, typer.Option(help="Seconds until a node's first token. [120]")]
InterToken = Annotated[Seconds, typer.Option(help="Seconds between a node's tokens. [60]")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


# typer makes the flags of the signature; their values are read together, from the context.
@app.command(help=PURPOSE)
def run(
    context: typer.Context,
    prefill: Prefill = None,
    decode: Decode = None,
    host: Host = None,
    port: Port = None,
    api_key: ApiKey = None,
    cluster_token: ClusterToken = None,
    ssl_certfile: SslCertfile = None,
    ssl_keyfile: SslKeyfile = None,
    ssl_ca_certs: SslCaCerts = None,
    served_model_name: ServedModelName = None,
    enable_prompt_tokens_details: PromptTokensDetails = None,
    routing_policy: Policy = None,
    request_timeout: Whole = None,
    first_token_timeout: FirstToken = None,
    inter_token_timeout: InterToken = None,
    drain_timeout: DrainTimeout = None,
    config: ConfigFile = None,
) -> None:
    run_server(lambda: ProxyServer(load_config(config, given_flags(context))))


if __name__ == "__main__":
    app()
