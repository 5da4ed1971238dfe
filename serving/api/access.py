"""Who may use an app, from which pages, and when: keys, labels of requests, and turns."""

import re
import uuid
from collections.abc import AsyncGenerator, Callable, Collection
from contextlib import AbstractAsyncContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.errors import AuthenticationError, OverloadedError
from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.config import ServerConfig
from serving.http.callers import (
    KeyHolder,
    KeyHolders,
    SingleKey,
    is_anthropic,
    remember,
    remember_label,
)
from serving.http.errors import error_response, preflight_hint

MAX_REQUEST_ID_CHARS = 128
_UNPRINTABLE = re.compile(r"[^\x21-\x7e]")


class BearerAuth:
    """Refuses requests without a known key, and those beyond its holder's limits.

    `open_paths` need no key and count for nobody. Whatever a client is told about its limits stands
    in the headers of every reply.
    """

    def __init__(self, app: ASGIApp, holders: KeyHolders, open_paths: Collection[str]) -> None:
        self._app = app
        self._holders = holders
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        key = _key_of(headers)
        holder = self._holders.find(key) if key else None
        if holder is None:
            message = "missing or wrong key: send Authorization: Bearer <key>, or x-api-key: <key>"
            error = AuthenticationError(message + preflight_hint(headers))
            await error_response(error, scope)(scope, receive, send)
            return

        async def send_with_limits(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(holder.headers())
            await send(message)

        remember(scope, holder)
        with ExitStack() as stack:
            # Asking costs next to nothing; only what brings a body makes the server work.
            if scope["method"] == "POST":
                try:
                    stack.enter_context(holder.entering())
                except OverloadedError as error:
                    await error_response(error, scope)(scope, receive, send_with_limits)
                    return
            await self._app(scope, receive, send_with_limits)


def _key_of(headers: Headers) -> bytes:
    """The key that a request brings: OpenAI's header before Anthropic's; empty for none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if not scheme:
        key = headers.get("x-api-key", "")
    elif scheme.lower() != "bearer":
        key = ""
    # Headers arrive as Latin-1, keys are UTF-8: the last byte of "à" is no space of the header.
    return key.strip(" \t").encode("latin-1")


class RequestIdEcho:
    """Puts X-Request-Id on every response: the caller's label, cleaned, or a fresh one.

    Anthropic's clients read it as Request-Id.

    A label is cut to 128 characters; an underscore replaces all that is not printable ASCII.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get("x-request-id", "")
        label = _UNPRINTABLE.sub("_", sent[:MAX_REQUEST_ID_CHARS]) or uuid.uuid4().hex
        remember_label(scope, label)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = label
                if is_anthropic(scope["path"]):
                    headers["request-id"] = label
            await send(message)

        await self._app(scope, receive, send_with_id)


@dataclass(slots=True, frozen=True)
class Admitted:
    """The turn of one request; `on_tokens` hears of the tokens that it generates.

    `place`: each of its sequences is generated inside such a block, which may have to wait.
    """

    on_tokens: Callable[[int], None] | None = None
    place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    def counted(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """`deltas` themselves where nobody counts their tokens."""
        return deltas if self.on_tokens is None else _counted(deltas, self.on_tokens)


class Admission(Protocol):
    """Lets planned requests in, each when its turn comes."""

    def admitting(
        self, plan: Plan, holder: KeyHolder | None
    ) -> AbstractAsyncContextManager[Admitted]:
        """Waits for the first sequence's turn; raises OverloadedError where it cannot wait."""
        ...


class AtOnce:
    """Every request may begin at once."""

    def admitting(
        self, plan: Plan, holder: KeyHolder | None
    ) -> AbstractAsyncContextManager[Admitted]:
        return nullcontext(Admitted())


@dataclass(slots=True, frozen=True)
class Access:
    """`holders` of keys, None: everybody. `allowed_origins`: of web pages whose scripts may ask."""

    holders: KeyHolders | None = None
    admission: Admission = field(default_factory=AtOnce)
    allowed_origins: tuple[str, ...] = ()


def access_of(config: ServerConfig) -> Access:
    """Access by the one key of `config`, or for everybody."""
    holders = None if config.api_key is None else SingleKey(config.api_key)
    return Access(holders, allowed_origins=config.allowed_origins)


async def _counted(
    deltas: AsyncGenerator[Delta, None], on_tokens: Callable[[int], None]
) -> AsyncGenerator[Delta, None]:
    try:
        async for delta in deltas:
            on_tokens(len(delta.token_ids))
            yield delta
    finally:
        await deltas.aclose()
