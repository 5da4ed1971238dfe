"""Every counter and histogram of the proxy, declared once. vLLM's names where vLLM has one."""

import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from engine.metrics import E2E_BUCKETS, ITL_BUCKETS, TTFT_BUCKETS
from engine.types import GenerateOutput


class ProxyMetrics:
    """One set per proxy, on the registry that its /metrics shows.

    `model_name` labels latencies; it is known before the first request.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.model_name = ""
        self.node_requests = self._counter(
            "tandem_proxy_node_requests",
            "Requests sent to nodes, retries included, by how they ended there.",
            *("policy", "kind", "node", "outcome"),
        )
        self.local_prefills = self._counter(
            "tandem_proxy_local_prefills",
            "Requests that a decode node prefilled itself, by reason.",
            "reason",
        )
        self.available_nodes = Gauge(
            "tandem_proxy_available_nodes",
            "Nodes that requests may be sent to.",
            ("kind",),
            registry=registry,
        )
        self.request_success = self._counter(
            "vllm:request_success",
            "Requests that ended with a finish reason.",
            *("model_name", "finished_reason"),
        )
        self.time_to_first_token = self._latency(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = self._latency(
            "vllm:inter_token_latency_seconds", "Between two outputs of a request.", ITL_BUCKETS
        )
        self.e2e_request_latency = self._latency(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", E2E_BUCKETS
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _latency(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry)


class RequestTimer:
    """The latencies of one request, from its arrival in the proxy."""

    def __init__(self, metrics: ProxyMetrics) -> None:
        self._metrics = metrics
        self._started = time.monotonic()
        self._previous: float | None = None

    def observe(self, output: GenerateOutput) -> None:
        """Counts one output of the request as sent now."""
        now, metrics, model_name = time.monotonic(), self._metrics, self._metrics.model_name
        if output.token_ids:
            if self._previous is None:
                metrics.time_to_first_token.labels(model_name).observe(now - self._started)
            else:
                metrics.inter_token_latency.labels(model_name).observe(now - self._previous)
            self._previous = now
        if output.finish_reason is not None:
            metrics.e2e_request_latency.labels(model_name).observe(now - self._started)
            metrics.request_success.labels(model_name, output.finish_reason).inc()
