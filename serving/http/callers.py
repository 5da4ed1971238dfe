"""Who calls an HTTP server: by its key, and within its limits. Knows no endpoint."""

import hmac
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from types import MappingProxyType
from typing import Final, Protocol

from starlette.datastructures import Headers
from starlette.types import Scope

from engine.errors import ForbiddenError
from engine.types import RequestOrigin

_CALLER: Final = "tandem.caller"
_LABEL: Final = "tandem.request_id"


class Caller(Protocol):
    """The client behind one key; `name` is for logs, `is_operator` may see what all others do.

    Those of one `tenant` take their turns together.
    """

    @property
    def name(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def is_operator(self) -> bool: ...

    def entering(self) -> AbstractContextManager[None]:
        """Counts one request until the block ends; OverloadedError where a limit is reached."""
        ...

    def headers(self) -> Mapping[str, str]:
        """The limits, and what is left of them."""
        ...


class Callers(Protocol):
    """The clients that a server lets in."""

    def find(self, key: bytes) -> Caller | None:
        """The client with this key; takes as long whichever key comes close to it."""
        ...


class Unlimited:
    """The one caller of a server with a single key."""

    name = "api-key"
    tenant = ""
    is_operator = True

    def entering(self) -> AbstractContextManager[None]:
        return nullcontext()

    def headers(self) -> Mapping[str, str]:
        return MappingProxyType({})


class SingleKey:
    """One key for everybody, without limits."""

    def __init__(self, api_key: str) -> None:
        self._expected = api_key.encode()
        self._caller = Unlimited()

    def find(self, key: bytes) -> Caller | None:
        return self._caller if hmac.compare_digest(key, self._expected) else None


def remember(scope: Scope, caller: Caller) -> None:
    """Endpoints find `caller` with `caller_of`."""
    scope[_CALLER] = caller


def caller_of(scope: Scope) -> Caller | None:
    """None on a server without keys, and on paths that are open to everybody."""
    caller: Caller | None = scope.get(_CALLER)
    return caller


def tenant_of(scope: Scope) -> str:
    """Whose turn a request takes; those without a key are one tenant."""
    caller = caller_of(scope)
    return "" if caller is None else caller.tenant


def remember_label(scope: Scope, label: str) -> None:
    """Endpoints find the request's X-Request-Id with `origin_of`."""
    scope[_LABEL] = label


def origin_of(scope: Scope) -> RequestOrigin:
    """Who sent this request, for logs and traces."""
    caller = caller_of(scope)
    return RequestOrigin(
        label=scope.get(_LABEL, ""),
        key="" if caller is None else caller.name,
        traceparent=Headers(scope=scope).get("traceparent", ""),
    )


def require_operator(scope: Scope) -> None:
    """Raises ForbiddenError for callers that may see their own requests only."""
    caller = caller_of(scope)
    if caller is not None and not caller.is_operator:
        raise ForbiddenError(f"key {caller.name!r} may not see this: it needs operator: true")
