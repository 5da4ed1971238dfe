"""POST /reset_prefix_cache, served by flag: forgets all cached prefixes. Knows no engine."""

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.errors import InvalidRequestError
from serving.http.callers import require_operator

# vLLM's parameters that ask for more than this server does.
_UNSERVED = ("reset_running_requests", "reset_external")


def reset_route(reset: Callable[[], Awaitable[None]]) -> Route:
    """The route. `reset` raises UnavailableError, which is a 503, while the cache is in use."""

    async def post(request: Request) -> Response:
        """200 with an empty body once nothing of what was cached before can be found."""
        require_operator(request.scope)
        for name in _UNSERVED:
            if request.query_params.get(name, "false").lower() not in ("false", "0", ""):
                raise InvalidRequestError(
                    f"{name} is not supported: running requests and tiers keep what they have",
                    param=name,
                )
        await reset()
        return Response()

    return Route("/reset_prefix_cache", post, methods=["POST"])
