"""The OpenAPI document of a server, made of its routes and of the types that read and write bodies.

What JSON schema cannot say, that a prompt must fit or which ids the vocabulary has, is not in it.
"""

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Final

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.types import KVTransferParams, SamplingParams
from serving.api.json_body import FLAGS_OF_TRANSFERS, lenient
from serving.api.messages.reply import MessageReply
from serving.api.messages.request import CountTokensRequest, MessagesRequest
from serving.api.replies import (
    ChatReply,
    CompletionReply,
    DetokenizeReply,
    LoadReply,
    ModelCard,
    ModelList,
    ReadyReply,
    TokenCount,
    TokenizeReply,
    VersionReply,
)
from serving.api.responses.reply import ResponseReply
from serving.api.responses.request import ResponsesRequest
from serving.api.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    neutral_values,
)
from serving.api.served_model import ServedModel
from serving.http.callers import is_anthropic
from serving.http.errors import AnthropicErrorReply, ErrorReply

REF: Final = "#/components/schemas/{name}"


@dataclass(slots=True, frozen=True)
class Described:
    """The bodies of one path; `reply` is a type, or a media type, or nothing."""

    summary: str
    reply: type[msgspec.Struct] | str | None = None
    body: type[msgspec.Struct] | None = None
    has_stream: bool = False


PATHS: Final[Mapping[str, Described]] = MappingProxyType(
    {
        "/v1/completions": Described(
            "Continue one or several prompts", CompletionReply, CompletionRequest, has_stream=True
        ),
        "/v1/chat/completions": Described(
            "Answer a conversation", ChatReply, ChatRequest, has_stream=True
        ),
        "/v1/responses": Described(
            "Answer input items", ResponseReply, ResponsesRequest, has_stream=True
        ),
        "/v1/messages": Described(
            "Answer a conversation", MessageReply, MessagesRequest, has_stream=True
        ),
        "/v1/messages/count_tokens": Described(
            "Count the tokens of a conversation", TokenCount, CountTokensRequest
        ),
        "/v1/models": Described("The models that are served", ModelList),
        "/v1/models/{name}": Described("One of them", ModelCard),
        "/tokenize": Described("Text or conversation to token ids", TokenizeReply, TokenizeRequest),
        "/detokenize": Described("Token ids to text", DetokenizeReply, DetokenizeRequest),
        "/health": Described("200 while the process can serve"),
        "/live": Described("200 while the process can serve"),
        "/ping": Described("200 while the process can serve"),
        "/ready": Described("200 while new requests are welcome", ReadyReply),
        "/load": Described("Generating requests that are under way", LoadReply),
        "/version": Described("The version of this server", VersionReply),
        "/metrics": Described("Metrics in Prometheus' text format", "text/plain"),
        "/openapi.json": Described("This document", "application/json"),
    }
)

# Whose sampling values are checked, and kv_transfer_params; count_tokens looks at none of them.
_GENERATING: Final = (CompletionRequest, ChatRequest, ResponsesRequest, MessagesRequest)


def openapi(
    served: ServedModel, routes: Iterable[Route], *, open_paths: Collection[str] | None
) -> dict[str, Any]:
    """The document of a server with these routes; keys guard all but `open_paths`; None: nothing.

    A route that `PATHS` does not know is there with the first line of its docstring.
    """
    bodies = [it.body for it in PATHS.values() if it.body is not None]
    read = bodies if served.strict_api else [lenient(kind) for kind in bodies]
    written = [it.reply for it in PATHS.values() if isinstance(it.reply, type)]
    _, schemas = msgspec.json.schema_components(
        [*read, *written, ErrorReply, AnthropicErrorReply, KVTransferParams, SamplingParams],
        ref_template=REF,
    )
    _bound_sampling(schemas)
    # Decoded as false where a proxy sends null, which the type does not say.
    for flag in FLAGS_OF_TRANSFERS:
        schemas[KVTransferParams.__name__]["properties"][flag] = {"type": ["boolean", "null"]}
    for kind in (*_GENERATING, CountTokensRequest):
        properties = schemas[kind.__name__]["properties"]
        for key, values in neutral_values(kind).items():
            properties[key] = {"enum": list(values)}
        if served.accept_kv_transfer_params and kind in _GENERATING:
            reference = {"$ref": REF.format(name=KVTransferParams.__name__)}
            properties["kv_transfer_params"] = {"anyOf": [reference, {"type": "null"}]}
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = route.path.replace(":path}", "}")
        is_open = open_paths is None or route.path in open_paths
        for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
            told = (route.endpoint.__doc__ or path).splitlines()[0]
            described = PATHS.get(path, Described(told))
            paths.setdefault(path, {})[method.lower()] = _operation(path, described, is_open)
    scheme = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Tandem", "version": served.version},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": scheme}},
    }


def _operation(path: str, described: Described, is_open: bool) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if isinstance(described.reply, str):
        content[described.reply] = {}
    elif described.reply is not None:
        content["application/json"] = _schema_of(described.reply)
    if described.has_stream:
        content["text/event-stream"] = {}
    ok = {"description": "OK", **({"content": content} if content else {})}
    failure = _schema_of(AnthropicErrorReply if is_anthropic(path) else ErrorReply)
    error = {"description": "Error", "content": {"application/json": failure}}
    operation: dict[str, Any] = {
        "summary": described.summary,
        "responses": {"200": ok, "4XX": error, "5XX": error},
        "security": [] if is_open else [{"key": []}],
    }
    if described.body is not None:
        content = {"application/json": _schema_of(described.body)}
        operation["requestBody"] = {"required": True, "content": content}
    if path.endswith("{name}"):
        operation["parameters"] = [
            {"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}
        ]
    return operation


def _schema_of(kind: type[msgspec.Struct]) -> dict[str, Any]:
    return {"schema": {"$ref": REF.format(name=kind.__name__)}}


def _bound_sampling(schemas: dict[str, Any]) -> None:
    """Bounds of sampling values stand in the type that the engine reads; bodies keep to them."""
    bounded = schemas.pop(SamplingParams.__name__)["properties"]
    schemas.pop("BadWord")
    for kind in _GENERATING:
        properties = schemas[kind.__name__]["properties"]
        for key in properties.keys() & bounded.keys():
            plain = {"anyOf": [{"type": bounded[key].get("type")}, {"type": "null"}]}
            if {name: it for name, it in properties[key].items() if name != "default"} == plain:
                bounds = {name: it for name, it in bounded[key].items() if name != "default"}
                properties[key] = {"anyOf": [bounds, {"type": "null"}]}


DOCUMENT_PATH: Final = "/openapi.json"


class Document:
    """The document of one app; made when somebody first asks, since few do."""

    def __init__(
        self, served: ServedModel, routes: Sequence[Route], open_paths: Collection[str] | None
    ) -> None:
        self._served = served
        self._open_paths = open_paths
        self.route = Route(DOCUMENT_PATH, self.openapi)
        self._routes = [*routes, self.route]

    async def openapi(self, request: Request) -> Response:
        """GET /openapi.json."""
        made = await asyncio.to_thread(lambda: self._openapi)
        return Response(made, media_type="application/json")

    @cached_property
    def _openapi(self) -> bytes:
        document = openapi(self._served, self._routes, open_paths=self._open_paths)
        return msgspec.json.encode(document)
