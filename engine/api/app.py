"""The OpenAI surface as a Starlette app over any Generator, for the proxy and the nodes alike."""

from collections.abc import Sequence

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.routing import Route

from engine.api.chat import ChatFormat
from engine.api.completion import CompletionFormat
from engine.api.endpoint import GenerateEndpoint
from engine.api.operations import PROBE_PATHS, Operations
from engine.api.plan import plan_chat, plan_completion
from engine.api.serving import Serving
from engine.generator import Generator
from engine.http.errors import ERROR_HANDLERS
from engine.http.middleware import BearerAuth, RequestIdEcho
from engine.http.request_bodies import RequestBodies


def create_app(
    generator: Generator,
    serving: Serving,
    *,
    metrics_registry: CollectorRegistry,
    api_key: str | None = None,
    open_routes: Sequence[Route] = (),
) -> Starlette:
    """App with the generating endpoints, /v1/models, /tokenize, /detokenize, probes and /metrics.

    `api_key` guards all but probes, metrics, load and `open_routes`; None guards nothing. Callers
    close the generator.
    """
    bodies = RequestBodies()
    routes, endpoints = [], []
    for path, planner, reply_format in (
        ("/v1/completions", plan_completion, CompletionFormat(serving.tokenizer)),
        ("/v1/chat/completions", plan_chat, ChatFormat(serving.tokenizer)),
    ):
        endpoint = GenerateEndpoint(generator, serving, reply_format, plan=planner, bodies=bodies)
        endpoints.append(endpoint)
        routes.append(Route(path, endpoint, methods=["POST"]))
    operations = Operations(
        generator,
        serving,
        metrics_registry,
        bodies=bodies,
        load=lambda: sum(endpoint.num_open for endpoint in endpoints),
    )
    # Outermost first: refusals of the API key carry the request id too.
    middleware = [Middleware(RequestIdEcho)]
    if api_key is not None:
        open_paths = {*PROBE_PATHS, *(route.path for route in open_routes)}
        middleware.append(Middleware(BearerAuth, api_key=api_key, open_paths=open_paths))
    return Starlette(
        routes=[*routes, *operations.routes(), *open_routes],
        middleware=middleware,
        exception_handlers=ERROR_HANDLERS,
    )
