"""The OpenAI surface as a Starlette app over any Generator, for the proxy and the nodes alike."""

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from engine.api.chat import ChatShape
from engine.api.completion import CompletionShape
from engine.api.endpoint import GenerateEndpoint
from engine.api.errors import on_disconnect, on_http_error, on_tandem_error, on_unexpected
from engine.api.generator import Generator
from engine.api.intake import Intake, IntakeLimits
from engine.api.middleware import BearerAuth, RequestIdEcho
from engine.api.operations import Operations
from engine.api.serving import Serving
from engine.api.shape import Shape
from engine.errors import TandemError


def create_app(
    generator: Generator,
    serving: Serving,
    *,
    metrics_registry: CollectorRegistry,
    api_key: str | None = None,
    accept_kv_transfer_params: bool = False,
    intake_limits: IntakeLimits | None = None,
) -> Starlette:
    """App with the generating endpoints, /v1/models, /tokenize, /detokenize, probes and /metrics.

    `api_key` guards all but probes and metrics; None leaves the door open.
    `accept_kv_transfer_params` is for nodes; without it the key is ignored. The generator stays its
    owner's to close.
    """
    shapes: dict[str, Shape] = {
        "/v1/completions": CompletionShape(serving.tokenizer),
        "/v1/chat/completions": ChatShape(serving.tokenizer),
    }
    intake = Intake(intake_limits or IntakeLimits())
    endpoints = {
        path: GenerateEndpoint(
            generator,
            serving,
            shape,
            intake=intake,
            accept_kv_transfer_params=accept_kv_transfer_params,
        )
        for path, shape in shapes.items()
    }
    routes = [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    operations = Operations(generator, serving, metrics_registry, intake=intake)
    return Starlette(
        routes=[*routes, *operations.routes()],
        middleware=_middleware(api_key),
        exception_handlers={
            TandemError: on_tandem_error,
            HTTPException: on_http_error,
            ClientDisconnect: on_disconnect,
            Exception: on_unexpected,
        },
    )


def _middleware(api_key: str | None) -> list[Middleware]:
    guard = [] if api_key is None else [Middleware(BearerAuth, api_key=api_key)]
    return [Middleware(RequestIdEcho), *guard]
