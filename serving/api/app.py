"""The OpenAI surface as a Starlette app over any Generator, for the proxy and the nodes alike."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from serving.api.access import Access, BearerAuth, RequestIdEcho
from serving.api.chat import ChatFormat
from serving.api.completion import CompletionFormat
from serving.api.endpoint import GenerateEndpoint, Planner
from serving.api.messages.reply import MessageFormat
from serving.api.messages.request import plan_message
from serving.api.openapi import DOCUMENT_PATH, Document
from serving.api.operations import PROBE_PATHS, Operations
from serving.api.plan import plan_chat, plan_completion
from serving.api.responses.reply import ResponseFormat
from serving.api.responses.request import plan_response
from serving.api.served_model import ServedModel
from serving.api.streams import ReplyFormat
from serving.generator import Generator
from serving.http.errors import ERROR_HANDLERS
from serving.http.request_bodies import RequestBodies

EXPOSED_HEADERS: Final = (
    "x-request-id",
    "retry-after",
    *(
        f"x-ratelimit-{word}-{kind}"
        for word in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
)
"""Headers that scripts of allowed pages may read."""


def create_app(
    generator: Generator,
    served: ServedModel,
    *,
    metrics_registry: CollectorRegistry,
    access: Access | None = None,
    routes: Sequence[Route] = (),
    open_routes: Sequence[Route] = (),
    stages: Callable[[], Mapping[str, str]] = dict,
) -> Starlette:
    """App with the generating endpoints, /v1/models, /tokenize, /detokenize, probes and /metrics.

    `routes` and `open_routes` come on top. Without `access` all is open; keys guard all but probes,
    metrics, load and `open_routes`. `stages`: by label how far each node of a cluster is, for
    /ready. Callers close the generator.
    """
    access = access or Access()
    bodies = RequestBodies()
    generating, endpoints = [], []
    formats: tuple[tuple[str, Planner, ReplyFormat], ...] = (
        ("/v1/completions", plan_completion, CompletionFormat(served.tokenizer)),
        ("/v1/chat/completions", plan_chat, ChatFormat(served.tokenizer)),
        ("/v1/responses", plan_response, ResponseFormat(served.tokenizer)),
        ("/v1/messages", plan_message, MessageFormat()),
    )
    for path, planner, reply_format in formats:
        endpoint = GenerateEndpoint(
            generator, served, reply_format, plan=planner, bodies=bodies, admission=access.admission
        )
        endpoints.append(endpoint)
        generating.append(Route(path, endpoint, methods=["POST"]))
    operations = Operations(
        generator,
        served,
        metrics_registry,
        bodies=bodies,
        load=lambda: sum(endpoint.num_open for endpoint in endpoints),
        stages=stages,
    )
    open_paths = {*PROBE_PATHS, DOCUMENT_PATH, *(route.path for route in open_routes)}
    every = [*generating, *operations.routes(), *routes, *open_routes]
    document = Document(served, every, open_paths if access.holders is not None else None)
    return Starlette(
        routes=[*every, document.route],
        middleware=middleware_of(access, open_paths),
        exception_handlers=ERROR_HANDLERS,
    )


def middleware_of(access: Access, open_paths: Collection[str]) -> list[Middleware]:
    """Outermost first: refusals carry the request id too, and pages may read them."""
    middleware = [Middleware(RequestIdEcho)]
    if access.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=access.allowed_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=EXPOSED_HEADERS,
            )
        )
    if access.holders is not None:
        middleware.append(Middleware(BearerAuth, holders=access.holders, open_paths=open_paths))
    return middleware
