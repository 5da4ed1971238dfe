"""`python -m proxy.register WORKER_URL`: makes a worker of another engine known to proxies.

Such a worker knows no proxy. This process, beside it, says to the proxies that it is there, again
and again, and when it is stopped that it leaves. Nodes of this project do that themselves.
"""

import asyncio
import secrets
from typing import Annotated, Final

import typer

from engine.errors import ConfigError
from proxy.backends.worker import Backend, WorkerUrl
from proxy.cluster.node import NodeKind
from serving.cli import option
from serving.config import ServerConfig
from serving.process import run_server
from serving.rpc.node_http import parse_node_url
from serving.rpc.registration import Introduction, Registration
from serving.tls import ClientTls, client_tls

PURPOSE: Final = (
    "Make a worker of another engine known to proxies, for as long as this runs. The proxies need "
    "--grpc-port."
)
Url = Annotated[str, typer.Argument(help="vllm+http://host:port or sglang+http://host:port.")]
Kind = Annotated[NodeKind, typer.Option(help="The part that the worker computes.")]
Proxies = Annotated[
    list[str], typer.Option("--proxy", help="http://host:port of a proxy; repeat for several.")
]
ClusterToken = Annotated[str | None, option(ServerConfig, "cluster_token")]
SslCaCerts = Annotated[str | None, option(ServerConfig, "ssl_ca_certs")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Registrar:
    """A `Server` that serves nobody: registered from `start` to `drain`."""

    def __init__(
        self,
        introduction: Introduction,
        proxies: list[str],
        *,
        token: str | None,
        tls: ClientTls | None,
    ) -> None:
        self._registration = Registration(introduction, token=token, tls=tls)
        self._proxies = proxies
        self._closed = asyncio.Event()

    async def start(self) -> None:
        self._registration.register_with(self._proxies)

    async def wait(self) -> None:
        await self._closed.wait()

    async def drain(self) -> None:
        await self._registration.leave()

    async def close(self) -> None:
        await self._registration.leave()
        self._closed.set()


def make_registrar(
    url: str, kind: NodeKind, proxies: list[str], *, token: str | None, ca_certs: str | None
) -> Registrar:
    """Raises ConfigError for wrong URLs."""
    worker = WorkerUrl.parse(url)
    if worker.backend is Backend.TANDEM:
        raise ConfigError(f"{url!r} names no other engine: a node of this project has --proxy")
    has_tls = any(parse_node_url(text).has_tls for text in proxies)
    introduction = Introduction(f"registrar-{secrets.token_hex(8)}", kind, worker.text)
    tls = client_tls(ca_certs) if has_tls else None
    return Registrar(introduction, proxies, token=token, tls=tls)


@app.command(help=PURPOSE)
def run(
    url: Url,
    kind: Kind,
    proxy: Proxies,
    *,
    cluster_token: ClusterToken = None,
    ssl_ca_certs: SslCaCerts = None,
) -> None:
    run_server(lambda: make_registrar(url, kind, proxy, token=cluster_token, ca_certs=ssl_ca_certs))


if __name__ == "__main__":
    app()
