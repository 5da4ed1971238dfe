"""`python -m connector.doctor P_URL D_URL`: checks before traffic."""

import asyncio
from typing import Annotated

import typer
from rich.console import Console

from connector.doctor.canary import fly
from connector.doctor.compare import compare
from connector.doctor.findings import Finding, Verdict
from connector.doctor.probe import probe
from engine.errors import ConfigError
from serving.cli import option
from serving.config import ServerConfig
from serving.rpc.node_http import HttpNode

PURPOSE = (
    "Check a prefill node and a decode node before traffic: ports, authentication, geometry, "
    "dtype, hash seed, protocol, transport, and a small hand-over whose tokens are compared. "
    "One line per finding; exits with 1 if anything is wrong."
)
PrefillUrl = Annotated[
    str, typer.Argument(help="http(s)://host:port of the prefill node.", metavar="P_URL")
]
DecodeUrl = Annotated[
    str, typer.Argument(help="http(s)://host:port of the decode node.", metavar="D_URL")
]
ClusterToken = Annotated[str | None, option(ServerConfig, "cluster_token")]
ApiKey = Annotated[str | None, option(ServerConfig, "api_key")]
SslCaCerts = Annotated[str | None, option(ServerConfig, "ssl_ca_certs")]
Canary = Annotated[bool, typer.Option(help="Run the small hand-over.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that each question may take.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=PURPOSE)
def run(
    p_url: PrefillUrl,
    d_url: DecodeUrl,
    cluster_token: ClusterToken = None,
    *,
    api_key: ApiKey = None,
    ssl_ca_certs: SslCaCerts = None,
    canary: Canary = True,
    timeout: Timeout = 30.0,
) -> None:
    try:
        p, d = (HttpNode.of(url, timeout, ssl_ca_certs) for url in (p_url, d_url))
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    findings = asyncio.run(examine((p, d), cluster_token, api_key, with_canary=canary))
    console = Console(highlight=False, soft_wrap=True)
    for finding in findings:
        console.print(finding.line())
    raise typer.Exit(any(finding.verdict is Verdict.WRONG for finding in findings))


async def examine(
    nodes: tuple[HttpNode, HttpNode],
    cluster_token: str | None,
    api_key: str | None,
    *,
    with_canary: bool,
) -> list[Finding]:
    """Findings, each after what it depends on; the canary only if none is wrong. `nodes`: P, D."""
    p, d = await asyncio.gather(
        probe("P", nodes[0], cluster_token), probe("D", nodes[1], cluster_token)
    )
    findings = [*p.findings, *d.findings, *compare(p, d)]
    if with_canary and all(finding.verdict is not Verdict.WRONG for finding in findings):
        findings.append(await fly(p, d, api_key))
    return findings


if __name__ == "__main__":
    app()
