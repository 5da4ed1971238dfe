"""An OpenTelemetry collector in this process: gRPC and HTTP on loopback, all spans in a list."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from grpc import aio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(slots=True)
class Seen:
    """One span, and the service that sent it."""

    service: str
    span: Span

    @property
    def attributes(self) -> dict[str, Any]:
        return {it.key: _value(it.value) for it in self.span.attributes}


@dataclass(slots=True)
class Collector(TraceServiceServicer):
    """Collects all spans that arrive; `raw` holds the messages as they were on the wire."""

    grpc_url: str = ""
    http_url: str = ""
    spans: list[Seen] = field(default_factory=list)
    raw: list[bytes] = field(default_factory=list)

    async def Export(self, request: ExportTraceServiceRequest, context: object) -> Any:
        self.take(request)
        return ExportTraceServiceResponse()

    async def post(self, request: web.Request) -> web.Response:
        self.take(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response()

    def take(self, message: ExportTraceServiceRequest) -> None:
        self.raw.append(message.SerializeToString())
        for resource in message.resource_spans:
            named = {it.key: it.value.string_value for it in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.spans += [Seen(named["service.name"], span) for span in scope.spans]

    def named(self, service: str, name: str) -> list[Seen]:
        return [it for it in self.spans if (it.service, it.span.name) == (service, name)]

    def one(self, service: str, name: str) -> Seen:
        """The only such span."""
        (found,) = self.named(service, name)
        return found


@asynccontextmanager
async def collecting(make: Callable[[], Collector] = Collector) -> AsyncIterator[Collector]:
    """A collector that listens on loopback."""
    collector = make()
    server = aio.server()
    add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    collector.grpc_url = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    app = web.Application()
    app.router.add_post("/v1/traces", collector.post)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    try:
        await server.start()
        await site.start()
        host, port = runner.addresses[0][:2]
        collector.http_url = f"http://{host}:{port}/v1/traces"
        yield collector
    finally:
        await server.stop(0)
        await runner.cleanup()


def _value(value: Any) -> Any:
    return getattr(value, value.WhichOneof("value"))
