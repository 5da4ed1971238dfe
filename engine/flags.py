"""Command-line options that nodes and proxy spell alike, under vLLM's names."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer

ApiKey = Annotated[
    str | None, typer.Option(envvar="VLLM_API_KEY", help="Key that HTTP clients must send.")
]
ClusterToken = Annotated[
    str | None,
    typer.Option(
        envvar="TANDEM_CLUSTER_TOKEN",
        help="Shared secret of all nodes and the proxy, long and random. It is never sent. Without "
        "it gRPC serves this machine only.",
    ),
]
SslCertfile = Annotated[
    str | None,
    typer.Option(
        help="Certificates (PEM) to serve TLS with: HTTP, and gRPC of nodes; with --ssl-keyfile. "
        "What transports move (blocks, states) is not encrypted by it."
    ),
]
SslKeyfile = Annotated[str | None, typer.Option(help="The key of --ssl-certfile (PEM).")]
SslCaCerts = Annotated[
    str | None,
    typer.Option(help="Authorities (PEM) that nodes are verified with. Default: the machine's."),
]
ConfigFile = Annotated[
    Path | None,
    typer.Option("--config", help="YAML whose keys are these flags; flags win."),
]
DrainTimeout = Annotated[
    float | None,
    typer.Option(
        help="Seconds that running requests get after SIGTERM, before they end with an error. [20]"
    ),
]
Host = Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")]
PromptTokensDetails = Annotated[
    bool | None,
    typer.Option(
        "--enable-prompt-tokens-details/--no-enable-prompt-tokens-details",
        help="Tell clients in `usage` how many prompt tokens were cached. [no]",
    ),
]
ServedModelName = Annotated[
    list[str] | None, typer.Option(help="Model name(s) in the API. Default: the model's own.")
]


def given_flags(context: typer.Context) -> dict[str, Any]:
    """The values of the flags that were given, by name; `--config` is not one of the settings.

    click takes an empty environment variable for none; here it is an empty value, since a secret
    that got lost on its way must not open a server.
    """
    given = {key: value for key, value in context.params.items() if value not in (None, [], ())}
    given.pop("config", None)
    for parameter in context.command.params:
        if isinstance(parameter.envvar, str) and os.environ.get(parameter.envvar) == "":
            given.setdefault(str(parameter.name), "")
    return given
