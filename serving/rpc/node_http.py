"""The HTTP side of a node: its URL, bounded requests, and the way to its gRPC port."""

from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from engine.errors import ConfigError, DeadlineExceededError, UnavailableError
from engine.types import Label, Port
from serving.rpc.address import join_host_port
from serving.tls import ClientTls, client_tls

MAX_REPLY_BYTES: Final = 2**20
HTTP_SCHEMES: Final = ("http", "https")
SCHEMES: Final = (*HTTP_SCHEMES, "grpc", "grpcs")


@dataclass(slots=True, frozen=True)
class NodeUrl:
    """A parsed node URL: `text` without a slash at its end, `host` without brackets."""

    text: str
    scheme: str
    host: str
    port: int

    @property
    def has_tls(self) -> bool:
        return self.scheme in ("https", "grpcs")


class NodeAddress(msgspec.Struct, frozen=True, kw_only=True):
    """A node's answer to GET /node_info. `host` is the one that the node tells its peers."""

    grpc_port: Port
    engine_id: Label
    kind: Label
    host: str = ""


@dataclass(slots=True, frozen=True)
class HttpAnswer:
    """A status, and the JSON object of the body; empty where the body is none."""

    status: int
    body: dict[str, Any]

    @property
    def error(self) -> str:
        """The server's own words for what went wrong."""
        error = self.body.get("error")
        said = error.get("message") if isinstance(error, dict) else None
        return f"HTTP {self.status}" + (f": {said}" if said else "")


@dataclass(slots=True, frozen=True)
class HttpNode:
    """The HTTP port of one node. Requests follow no redirect and end after `timeout_s`."""

    url: str
    host: str
    timeout_s: float
    tls: ClientTls | None = None

    @classmethod
    def of(cls, text: str, timeout_s: float, ca_certs: str | None = None) -> "HttpNode":
        """Raises ConfigError for anything but `http://host:port` and `https://host:port`."""
        url = parse_node_url(text)
        if url.scheme not in HTTP_SCHEMES:
            raise ConfigError(f"{text!r} is not a node's HTTP port: write http://host:port")
        return cls(url.text, url.host, timeout_s, client_tls(ca_certs) if url.has_tls else None)

    async def get(self, path: str) -> HttpAnswer:
        """Raises UnavailableError or DeadlineExceededError without an answer."""
        return await self._ask("GET", path)

    async def post(self, path: str, key: str | None, body: dict[str, Any]) -> HttpAnswer:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        return await self._ask("POST", path, json=body, headers=headers)

    async def _ask(self, method: str, path: str, **options: Any) -> HttpAnswer:
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        options["ssl"] = True if self.tls is None else self.tls.context
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(method, self.url + path, allow_redirects=False, **options) as reply,
            ):
                return HttpAnswer(reply.status, await _read(reply))
        except aiohttp.ClientConnectorError as error:
            # aiohttp's own text speaks of ssl where there is none.
            is_tls = isinstance(error, aiohttp.ClientSSLError)
            why = str(error) if is_tls else error.os_error.strerror or error.os_error
            raise UnavailableError(f"cannot connect: {why}") from error
        except aiohttp.ClientError as error:
            raise UnavailableError(str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise DeadlineExceededError(f"no answer within {self.timeout_s:g} s") from error


def parse_node_url(text: str) -> NodeUrl:
    """Raises `ConfigError` for anything but a scheme, a host and a port."""
    # `parts.port` raises for anything but a number up to 65,535.
    parts = urlsplit(text)
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme not in SCHEMES or not parts.hostname or not port:
        raise ConfigError(
            f"node URL {text!r} must be http://host:port or grpc://host:port, with TLS https:// or "
            "grpcs://"
        )
    if parts.path not in ("", "/") or parts.query or parts.fragment or parts.username:
        raise ConfigError(f"node URL {text!r} must end after the port")
    return NodeUrl(text.rstrip("/"), parts.scheme, parts.hostname, port)


async def resolve_grpc_address(
    url: NodeUrl, *, timeout_s: float, tls: ClientTls | None = None
) -> str:
    """`host:port` for gRPC. Raises `UnavailableError` while the node's HTTP port does not tell."""
    if url.scheme not in HTTP_SCHEMES:
        return join_host_port(url.host, url.port)
    where = f"{url.text}/node_info"
    try:
        answer = await HttpNode(url.text, url.host, timeout_s, tls).get("/node_info")
        address = msgspec.convert(answer.body, NodeAddress)
    except (UnavailableError, DeadlineExceededError, msgspec.ValidationError) as error:
        raise UnavailableError(f"{where}: {error}") from error
    if answer.status != 200:
        raise UnavailableError(f"{where} answered {answer.status}, not 200")
    return join_host_port(url.host, address.grpc_port)


async def _read(reply: aiohttp.ClientResponse) -> dict[str, Any]:
    data = bytearray()
    async for chunk in reply.content.iter_any():
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise UnavailableError(f"the answer is longer than {MAX_REPLY_BYTES} bytes")
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
