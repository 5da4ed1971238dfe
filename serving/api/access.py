"""Who may use an app, from which pages, and what a planned request has to wait for."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from serving.api.choice_text import Delta
from serving.api.plan import Plan
from serving.config import ServerConfig
from serving.http.callers import Caller, Callers, SingleKey


@dataclass(slots=True, frozen=True)
class Admitted:
    """A request as its caller may have it; `on_tokens` hears of the tokens that it generates.

    `place`: each of its sequences is generated inside such a block, which may have to wait.
    """

    plan: Plan
    on_tokens: Callable[[int], None] | None = None
    place: Callable[[], AbstractAsyncContextManager[None]] = nullcontext

    def counted(self, deltas: AsyncGenerator[Delta, None]) -> AsyncGenerator[Delta, None]:
        """`deltas` themselves where nobody counts their tokens."""
        return deltas if self.on_tokens is None else _counted(deltas, self.on_tokens)


class Admission(Protocol):
    """Lets planned requests in, each when its turn comes."""

    def admitting(self, plan: Plan, caller: Caller | None) -> AbstractAsyncContextManager[Admitted]:
        """Returns when it is the turn of the request's first sequence.

        Raises OverloadedError where it cannot wait, and InvalidRequestError for what the caller may
        not ask for.
        """
        ...


class AtOnce:
    """Every request may begin at once."""

    def admitting(self, plan: Plan, caller: Caller | None) -> AbstractAsyncContextManager[Admitted]:
        return nullcontext(Admitted(plan))


@dataclass(slots=True, frozen=True)
class Access:
    """`callers` None: everybody. `allowed_origins`: of web pages whose scripts may ask."""

    callers: Callers | None = None
    admission: Admission = field(default_factory=AtOnce)
    allowed_origins: tuple[str, ...] = ()


def access_of(config: ServerConfig) -> Access:
    """That of a server whose clients share one key, or need none."""
    callers = None if config.api_key is None else SingleKey(config.api_key)
    return Access(callers, allowed_origins=config.allowed_origins)


async def _counted(
    deltas: AsyncGenerator[Delta, None], on_tokens: Callable[[int], None]
) -> AsyncGenerator[Delta, None]:
    try:
        async for delta in deltas:
            on_tokens(len(delta.token_ids))
            yield delta
    finally:
        await deltas.aclose()
