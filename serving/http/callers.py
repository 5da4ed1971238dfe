"""Who calls an HTTP server: by its key, within its limits and terms. Knows no endpoint."""

import hashlib
import hmac
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from engine.errors import ForbiddenError, InvalidRequestError
from engine.types import RequestOrigin

ANTHROPIC_PATH: Final = "/v1/messages"
_HOLDER: Final = "tandem.key_holder"
_LABEL: Final = "tandem.request_id"


@dataclass(slots=True, frozen=True)
class Terms:
    """The terms of one key: what its holder may ask for, and what it is not told.

    `cache_world`: the prefixes of two worlds never meet; the empty one is shared by all tenants
    that are not isolated. None: there are no worlds, and salts stay as clients send them.
    """

    may_choose_priority: bool = True
    cache_world: str | None = None
    hides_cached_tokens: bool = False


class KeyHolder(Protocol):
    """The client of one key; `name` is for logs, `is_operator` may see what all others do.

    Those of one `tenant` take their turns together.
    """

    @property
    def name(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def is_operator(self) -> bool: ...

    @property
    def terms(self) -> Terms: ...

    def entering(self) -> AbstractContextManager[None]:
        """Counts one request until the block ends; OverloadedError where a limit is reached."""
        ...

    def headers(self) -> Mapping[str, str]:
        """The limits, and what is left of them."""
        ...


class KeyHolders(Protocol):
    """The clients that a server lets in."""

    def find(self, key: bytes) -> KeyHolder | None:
        """The client with this key; takes as long whichever key comes close to it."""
        ...


class SingleKey:
    """One key for everybody, without limits: its holder is the one client of the server."""

    name = "api-key"
    tenant = ""
    is_operator = True
    terms = Terms()

    def __init__(self, api_key: str) -> None:
        self._expected = api_key.encode()

    def find(self, key: bytes) -> KeyHolder | None:
        return self if hmac.compare_digest(key, self._expected) else None

    def entering(self) -> AbstractContextManager[None]:
        return nullcontext()

    def headers(self) -> Mapping[str, str]:
        return MappingProxyType({})


@dataclass(slots=True, frozen=True)
class Caller:
    """The sender of one request, known before its body is read.

    What a body asks for and what its sender may have meet here, once, when requests are built.
    `label`: X-Request-Id; `key`: the name of the key; `session_id`: X-Session-ID.
    """

    label: str = ""
    key: str = ""
    traceparent: str = ""
    session_id: str | None = None
    tenant: str = ""
    terms: Terms = Terms()

    def origin(self, num_choices: int) -> RequestOrigin:
        """For logs and traces; `num_choices` as there."""
        return RequestOrigin(
            label=self.label, key=self.key, traceparent=self.traceparent, num_choices=num_choices
        )

    def priority(self, asked: int) -> int:
        """Raises InvalidRequestError where this caller may not choose one."""
        if asked and not self.terms.may_choose_priority:
            raise InvalidRequestError(
                f"key {self.key!r} may not choose a priority: leave it out", param="priority"
            )
        return asked

    def cache_salt(self, asked: str | None) -> str | None:
        """The salt of this caller's prefixes: a digest, so no client can name another world's."""
        world = self.terms.cache_world
        if world is None or (not world and asked is None):
            return asked
        return hashlib.sha256(f"{world}\0{asked or ''}".encode()).hexdigest()


def remember(scope: Scope, holder: KeyHolder) -> None:
    """Endpoints find `holder` with `holder_of`."""
    scope[_HOLDER] = holder


def remember_label(scope: Scope, label: str) -> None:
    """Endpoints find the request's X-Request-Id with `label_of`."""
    scope[_LABEL] = label


def is_anthropic(path: str) -> bool:
    """Whether callers of this path speak Anthropic's protocol, on all others OpenAI's."""
    return path == ANTHROPIC_PATH or path.startswith(f"{ANTHROPIC_PATH}/")


def holder_of(scope: Scope) -> KeyHolder | None:
    """None on a server without keys, and on paths that are open to everybody."""
    holder: KeyHolder | None = scope.get(_HOLDER)
    return holder


def label_of(scope: Scope) -> str:
    """The request's X-Request-Id; empty before it is known."""
    label: str = scope.get(_LABEL, "")
    return label


def tenant_of(scope: Scope) -> str:
    """Whose turn a request takes; those without a key are one tenant."""
    holder = holder_of(scope)
    return "" if holder is None else holder.tenant


def caller_of(scope: Scope) -> Caller:
    """The sender of the request that `scope` describes."""
    headers, holder = Headers(scope=scope), holder_of(scope)
    return Caller(
        label=label_of(scope),
        key="" if holder is None else holder.name,
        traceparent=headers.get("traceparent", ""),
        session_id=headers.get("x-session-id"),
        tenant=tenant_of(scope),
        terms=Terms() if holder is None else holder.terms,
    )


def require_operator(scope: Scope) -> None:
    """Raises ForbiddenError for callers that may see their own requests only."""
    holder = holder_of(scope)
    if holder is not None and not holder.is_operator:
        raise ForbiddenError(f"key {holder.name!r} may not see this: it needs operator: true")
