"""HTTP to one node, within bounds, as plain answers. Knows no endpoint."""

from dataclasses import dataclass
from typing import Any
from urllib.parse import SplitResult, urlsplit

import aiohttp
import msgspec

from engine.errors import ConfigError, DeadlineExceededError, UnavailableError
from engine.tls import ClientTls, client_tls

MAX_REPLY_BYTES = 16 * 2**20


@dataclass(slots=True, frozen=True)
class HttpAnswer:
    """A status, and the JSON object of the body; empty where it is none."""

    status: int
    body: dict[str, Any]

    @property
    def error(self) -> str:
        """What the server says went wrong."""
        error = self.body.get("error")
        said = error.get("message") if isinstance(error, dict) else None
        return f"HTTP {self.status}" + (f": {said}" if said else "")


@dataclass(slots=True, frozen=True)
class HttpNode:
    """One node's HTTP side."""

    url: str
    host: str
    timeout_s: float
    tls: ClientTls | None = None

    @classmethod
    def of(cls, url: str, timeout_s: float, ca_certs: str | None = None) -> "HttpNode":
        """Raises ConfigError for anything but `http://host:port` and `https://host:port`."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not _has_port(parts):
            raise ConfigError(
                f"{url!r} is no node; write http://host:port or https://host:port, its HTTP port"
            )
        tls = client_tls(ca_certs) if parts.scheme == "https" else None
        return cls(f"{parts.scheme}://{parts.netloc}", parts.hostname, timeout_s, tls)

    async def get(self, path: str) -> HttpAnswer:
        """Raises UnavailableError or DeadlineExceededError when there is no answer."""
        return await self._ask("GET", path, None, body=None)

    async def post(self, path: str, key: str | None, body: dict[str, Any]) -> HttpAnswer:
        """Raises UnavailableError or DeadlineExceededError when there is no answer."""
        return await self._ask("POST", path, key, body=body)

    async def _ask(
        self, method: str, path: str, key: str | None, *, body: dict[str, Any] | None
    ) -> HttpAnswer:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        timeout = aiohttp.ClientTimeout(total=self.timeout_s)
        trusted = True if self.tls is None else self.tls.context
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as session,
                session.request(
                    method, self.url + path, json=body, headers=headers, ssl=trusted
                ) as reply,
            ):
                return HttpAnswer(reply.status, _object(await _read(reply)))
        except aiohttp.ClientError as error:
            raise UnavailableError(str(error) or type(error).__name__) from error
        except TimeoutError as error:
            raise DeadlineExceededError(f"no answer within {self.timeout_s:g} s") from error


async def _read(reply: aiohttp.ClientResponse) -> bytes:
    data = bytearray()
    async for chunk in reply.content.iter_any():
        data += chunk
        if len(data) > MAX_REPLY_BYTES:
            raise UnavailableError(f"the answer is longer than {MAX_REPLY_BYTES} bytes")
    return bytes(data)


def _object(data: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}


def _has_port(parts: SplitResult) -> bool:
    try:
        return parts.port is not None
    except ValueError:
        return False
