"""From a node's URL to its gRPC address: by the URL itself, or by asking the node's HTTP port."""

import asyncio
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from engine.errors import ConfigError, UnavailableError
from engine.rpc.address import join_host_port
from engine.tls import ClientTls
from engine.types import Label, Port

MAX_REPLY_BYTES: Final = 64 * 2**10
SCHEMES: Final = ("http", "https", "grpc", "grpcs")


class NodeAddress(msgspec.Struct, frozen=True):
    """What a node answers to GET /node_info, as far as the proxy needs it."""

    grpc_port: Port
    engine_id: Label
    kind: Label


@dataclass(slots=True, frozen=True)
class NodeUrl:
    """A parsed node URL. `host` is without brackets."""

    text: str
    scheme: str
    host: str
    port: int

    @property
    def has_tls(self) -> bool:
        return self.scheme in ("https", "grpcs")


def parse_node_url(text: str) -> NodeUrl:
    """Raises `ConfigError` for anything but a scheme, a host and a port."""
    parts = urlsplit(text)
    port = _port_of(parts)
    if parts.scheme not in SCHEMES or parts.hostname is None or port is None:
        raise ConfigError(
            f"node URL {text!r} must be http://host:port or grpc://host:port, with TLS https:// or "
            "grpcs://"
        )
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"node URL {text!r} must end after the port")
    return NodeUrl(text.rstrip("/"), parts.scheme, parts.hostname, port)


def _port_of(parts: SplitResult) -> int | None:
    try:
        return parts.port or None
    except ValueError:
        return None


async def resolve_grpc_address(
    url: NodeUrl, *, timeout_s: float, tls: ClientTls | None = None
) -> str:
    """`host:port` for gRPC; raises `UnavailableError` while the node's HTTP port does not tell."""
    if url.scheme in ("grpc", "grpcs"):
        return join_host_port(url.host, url.port)
    try:
        async with asyncio.timeout(timeout_s):
            address = await _fetch_address(f"{url.text}/node_info", tls)
    except TimeoutError as error:
        raise UnavailableError(f"{url.text}/node_info: no answer in {timeout_s:g} s") from error
    except (aiohttp.ClientError, msgspec.DecodeError) as error:
        raise UnavailableError(f"{url.text}/node_info: {error}") from error
    return join_host_port(url.host, address.grpc_port)


async def _fetch_address(url: str, tls: ClientTls | None) -> NodeAddress:
    async with (
        aiohttp.ClientSession() as session,
        session.get(url, allow_redirects=False, ssl=True if tls is None else tls.context) as reply,
    ):
        if reply.status != 200:
            raise UnavailableError(f"{url} answered {reply.status}, not 200")
        return msgspec.json.decode(await reply.content.read(MAX_REPLY_BYTES), type=NodeAddress)
