"""From a node's URL to its gRPC address: by the URL itself, or by asking the node's HTTP port."""

import asyncio
from dataclasses import dataclass
from typing import Final
from urllib.parse import SplitResult, urlsplit

import msgspec

from engine.errors import AuthenticationError, ConfigError, UnavailableError
from engine.types import Label, Port

MAX_REPLY_BYTES: Final = 64 * 2**10


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
    def quoted_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host


def parse_node_url(text: str) -> NodeUrl:
    """Raises `ConfigError` for anything but `http://host:port` and `grpc://host:port`."""
    parts = urlsplit(text)
    port = _port_of(parts)
    if parts.scheme not in ("http", "grpc") or parts.hostname is None or port is None:
        raise ConfigError(f"node URL {text!r} must be http://host:port or grpc://host:port")
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"node URL {text!r} must end after the port")
    return NodeUrl(text.rstrip("/"), parts.scheme, parts.hostname, port)


def _port_of(parts: SplitResult) -> int | None:
    try:
        return parts.port or None
    except ValueError:
        return None


async def resolve_grpc_address(url: NodeUrl, *, token: str | None, timeout_s: float) -> str:
    """`host:port` for gRPC. Raises `UnavailableError` while the node's HTTP port does not tell."""
    if url.scheme == "grpc":
        return f"{url.quoted_host}:{url.port}"
    try:
        async with asyncio.timeout(timeout_s):
            reply = await _fetch_node_info(url, token)
    except TimeoutError as error:
        raise UnavailableError(f"{url.text}/node_info gave no answer in {timeout_s} s") from error
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"{url.text} cannot be reached: {error}") from error
    return f"{url.quoted_host}:{_decode_node_info(url, reply).grpc_port}"


async def _fetch_node_info(url: NodeUrl, token: str | None) -> bytes:
    """One HTTP/1.0 exchange: small, bounded, and cancelled for good when its deadline passes."""
    reader, writer = await asyncio.open_connection(url.host, url.port, limit=MAX_REPLY_BYTES)
    try:
        authorization = "" if token is None else f"Authorization: Bearer {token}\r\n"
        head = f"GET /node_info HTTP/1.0\r\nHost: {url.quoted_host}\r\n{authorization}\r\n"
        writer.write(head.encode())
        return await _read_at_most(reader, MAX_REPLY_BYTES)
    finally:
        writer.close()


async def _read_at_most(reader: asyncio.StreamReader, limit: int) -> bytes:
    data = bytearray()
    while len(data) <= limit and (chunk := await reader.read(limit)):
        data += chunk
    return bytes(data[:limit])


def _decode_node_info(url: NodeUrl, reply: bytes) -> NodeAddress:
    head, _, body = reply.partition(b"\r\n\r\n")
    status = head.split(b" ", 2)[1:2]
    if status in ([b"401"], [b"403"]):
        raise AuthenticationError(f"{url.text}/node_info refused the cluster token")
    if status != [b"200"]:
        raise UnavailableError(f"{url.text}/node_info answered {head[:100]!r}, not 200")
    try:
        return msgspec.json.decode(body, type=NodeAddress)
    except msgspec.DecodeError as error:
        raise UnavailableError(f"{url.text}/node_info is not a node's answer: {error}") from error
