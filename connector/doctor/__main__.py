"""`python -m connector.doctor [P_URL D_URL]`: checks nodes and an offload folder before traffic."""

import asyncio
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from connector.doctor.canary import fly
from connector.doctor.compare import compare
from connector.doctor.findings import Finding, Verdict
from connector.doctor.folder import examine_folder
from connector.doctor.probe import probe
from engine.cli import option
from engine.config import ServerConfig
from engine.errors import ConfigError
from engine.rpc.node_http import HttpNode

PURPOSE = (
    "Check a prefill node and a decode node before traffic: ports, authentication, geometry, "
    "dtype, hash seed, protocol, transport, and a small hand-over whose tokens are compared. "
    "With --offload-folder, or with it alone: room, speed and files of an offload tier. "
    "One line per finding; exits with 1 if anything is wrong."
)
Prefill = Annotated[str | None, typer.Argument(help="http(s)://host:port of the prefill node.")]
Decode = Annotated[str | None, typer.Argument(help="http(s)://host:port of the decode node.")]
OffloadFolder = Annotated[Path | None, typer.Option(help="disk_path of an OffloadConnector.")]
ClusterToken = Annotated[str | None, option(ServerConfig, "cluster_token")]
ApiKey = Annotated[str | None, option(ServerConfig, "api_key")]
SslCaCerts = Annotated[str | None, option(ServerConfig, "ssl_ca_certs")]
Canary = Annotated[bool, typer.Option(help="Run the small hand-over.")]
Timeout = Annotated[float, typer.Option(min=0.1, help="Seconds that each question may take.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command(help=PURPOSE)
def run(
    prefill_url: Prefill = None,
    decode_url: Decode = None,
    cluster_token: ClusterToken = None,
    *,
    api_key: ApiKey = None,
    ssl_ca_certs: SslCaCerts = None,
    canary: Canary = True,
    timeout: Timeout = 30.0,
    offload_folder: OffloadFolder = None,
) -> None:
    urls = [url for url in (prefill_url, decode_url) if url is not None]
    if len(urls) == 1 or not (urls or offload_folder):
        raise typer.BadParameter("name a prefill and a decode node, or --offload-folder")
    try:
        nodes = [HttpNode.of(url, timeout, ssl_ca_certs) for url in urls]
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    findings = [] if offload_folder is None else examine_folder(offload_folder)
    if nodes:
        p, d = nodes
        findings += asyncio.run(examine((p, d), cluster_token, api_key, with_canary=canary))
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
    """All findings, each after those that it depends on; the canary flies only if nothing is wrong.

    `nodes`: P, then D.
    """
    p, d = await asyncio.gather(
        probe("P", nodes[0], cluster_token), probe("D", nodes[1], cluster_token)
    )
    findings = [*p.findings, *d.findings, *compare(p, d)]
    is_well = all(finding.verdict is not Verdict.WRONG for finding in findings)
    if with_canary and is_well:
        findings.append(await fly(p, d, api_key))
    return findings


if __name__ == "__main__":
    app()
