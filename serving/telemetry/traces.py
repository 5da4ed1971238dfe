"""OpenTelemetry spans of requests, one trace from the proxy through P, the pull and D.

    proxy  llm_request |---------------------------------------------------------|
             prefill    |----------------|      decode |--------------------------|
    P          llm_request |------------|
    D                                           llm_request |---------------------|
                                                  kv_transfer |----|

Spans are made of request records, so nothing is done per token, and nothing at all without
`--otlp-traces-endpoint`. Attributes follow the GenAI conventions as vLLM writes them
(vllm/tracing), and `tandem.*`; no prompt and no answer is in them. The context is W3C's
`traceparent`: from the client's HTTP header, and with each request to a node.
"""

import asyncio
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from engine.errors import ConfigError
from engine.types import KVTransferStats
from serving.telemetry.request_records import RecordReader, RequestRecord, Visit

HTTP_PATH: Final = "/v1/traces"
EXPORT_TIMEOUT_S: Final = 5.0
CLOSE_S: Final = 2.0
"""For the spans that still wait at the end: a collector that hangs must not hold up a shutdown."""
MAX_QUEUED_SPANS: Final = 4096
MAX_BATCH_SPANS: Final = 512


class Traces(RecordReader):
    """Owner of the exporter. `close` it; spans that wait are sent, or dropped after `CLOSE_S`.

    Raises `ConfigError` for an endpoint that is no http(s) URL. A collector that cannot be reached
    costs spans and lines in the log, and no request waits for it.
    """

    def __init__(self, endpoint: str, *, service: str, instance: str) -> None:
        self._exporter = _exporter(endpoint)
        named = {"service.name": service, "service.instance.id": instance}
        self._provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=MAX_QUEUED_SPANS,
                max_export_batch_size=MAX_BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("tandem")
        self._context = TraceContextTextMapPropagator()
        # The open spans of records and visits, which cannot be hashed.
        self._spans: dict[int, Span] = {}

    def began(self, record: RequestRecord) -> None:
        parent = self._context.extract({"traceparent": record.request.origin.traceparent})
        at = record.arrived_at
        self._spans[id(record)] = self._start("llm_request", parent, at, kind=SpanKind.SERVER)

    def ended(self, record: RequestRecord) -> None:
        span = self._spans.pop(id(record))
        span.set_attributes(_attributes(record))
        if record.kv_transfer is not None and not record.visits:
            self._add_transfer(span, record.kv_transfer)
        self._end(span, record.arrived_at + (record.ended or 0.0), record.failed)

    def visit_began(self, record: RequestRecord, visit: Visit) -> None:
        parent = set_span_in_context(self._spans[id(record)])
        span = self._start(visit.kind, parent, record.arrived_at + visit.began)
        span.set_attributes({"server.address": visit.node, "tandem.routing.reason": visit.reason})
        carrier: dict[str, str] = {}
        self._context.inject(carrier, set_span_in_context(span))
        # OTEL_SDK_DISABLED makes spans that have no context.
        visit.traceparent = carrier.get("traceparent", visit.traceparent)
        self._spans[id(visit)] = span

    def visit_ended(self, record: RequestRecord, visit: Visit) -> None:
        span = self._spans.pop(id(visit))
        span.set_attribute("tandem.outcome", visit.outcome)
        self._end(span, record.arrived_at + (visit.ended or 0.0), visit.outcome == "failed")

    async def close(self) -> None:
        """Sends what waits; a collector that does not take it in `CLOSE_S` loses it."""
        closing = asyncio.ensure_future(asyncio.to_thread(self._provider.shutdown))
        await asyncio.wait([closing], timeout=CLOSE_S)
        if not closing.done():
            # Ends the call under way, and refuses what the thread of the provider still sends.
            await asyncio.to_thread(self._exporter.shutdown)
        await closing

    def _add_transfer(self, parent: Span, moved: KVTransferStats) -> None:
        """A span of its own for the pull of a remote prefill, which D has timed."""
        began = moved.started_at or None
        span = self._start("kv_transfer", set_span_in_context(parent), began)
        span.set_attributes(
            {
                "tandem.kv_transfer.attention_bytes": moved.attention_bytes,
                "tandem.kv_transfer.state_bytes": moved.state_bytes,
                "tandem.kv_transfer.verified": moved.verified,
                "tandem.kv_transfer.cause": moved.cause,
                "tandem.prefill_cached_tokens": moved.prefill_cached_tokens,
                "tandem.decode_cached_tokens": moved.decode_cached_tokens,
            }
        )
        ended = None if began is None else began + moved.transfer_ms / 1e3
        self._end(span, ended, bool(moved.cause))

    def _start(
        self, name: str, parent: Context, at: float | None, *, kind: SpanKind = SpanKind.CLIENT
    ) -> Span:
        return self._tracer.start_span(name, parent, kind, start_time=_ns(at))

    def _end(self, span: Span, at: float | None, failed: bool) -> None:
        if failed:
            span.set_status(StatusCode.ERROR)
        span.end(_ns(at))


def _exporter(endpoint: str) -> SpanExporter:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigError(
            f"--otlp-traces-endpoint {endpoint!r} is no URL: write http://HOST:4317 for gRPC, or "
            f"http://HOST:4318{HTTP_PATH} for HTTP"
        )
    if url.path.endswith(HTTP_PATH):
        return http.OTLPSpanExporter(endpoint, timeout=EXPORT_TIMEOUT_S)
    insecure = url.scheme == "http"
    return grpc.OTLPSpanExporter(endpoint, insecure=insecure, timeout=EXPORT_TIMEOUT_S)


def _attributes(record: RequestRecord) -> dict[str, str | int | float]:
    sampling = record.request.sampling
    told: dict[str, str | int | float] = {
        "gen_ai.request.id": record.request.request_id,
        "gen_ai.request.max_tokens": sampling.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.usage.prompt_tokens": record.num_prompt_tokens,
        "gen_ai.usage.completion_tokens": record.num_tokens,
        "gen_ai.latency.e2e": record.ended or 0.0,
        "tandem.cached_tokens": record.num_cached_tokens,
        "tandem.outcome": record.outcome,
    }
    if record.first_output is not None:
        told["gen_ai.latency.time_to_first_token"] = record.first_output
    if record.queue_s is not None:
        told["gen_ai.latency.time_in_queue"] = record.queue_s
    if record.request.origin.label:
        told["tandem.x_request_id"] = record.request.origin.label
    return told


def _ns(seconds: float | None) -> int | None:
    return None if seconds is None else int(1e9 * seconds)
