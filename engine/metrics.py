"""Every metric of a node, declared once, under vLLM's name where vLLM has one.

Numbers that a component counts anyway are read when Prometheus asks; nothing is updated per step.
"""

import time
from collections.abc import Callable, Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from engine.types import GenerateOutput, GenerateRequest

LABELS = ("model_name", "engine")
LATENCY_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip
BYTES_BUCKETS = tuple(float(4**power) for power in range(6, 18))
SHARE_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)
COUNT_BUCKETS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 512.0, 2048.0)

Metric = GaugeMetricFamily | CounterMetricFamily


class NodeMetrics:
    """The registry of one node; `labels` are (served model name, engine id)."""

    def __init__(self, model_name: str, engine_id: str) -> None:
        self.registry = CollectorRegistry()
        self.labels = (model_name, engine_id)

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram with this node's labels bound."""
        metric = Histogram(name, help_text, LABELS, registry=self.registry, buckets=buckets)
        return metric.labels(*self.labels)

    def counter(self, name: str, help_text: str) -> Counter:
        """A counter with this node's labels bound."""
        return Counter(name, help_text, LABELS, registry=self.registry).labels(*self.labels)

    def labelled_counter(self, name: str, help_text: str, label: str) -> Counter:
        """A counter with one more label, to be bound with `.labels(*metrics.labels, value)`."""
        return Counter(name, help_text, (*LABELS, label), registry=self.registry)

    def read_gauge(self, name: str, help_text: str, read: Callable[[], float]) -> None:
        """A gauge that is read when it is scraped."""

        def collect() -> Iterable[Metric]:
            family = GaugeMetricFamily(name, help_text, labels=LABELS)
            family.add_metric(self.labels, read())
            yield family

        self.registry.register(_Reader(collect))

    def read_total(self, name: str, help_text: str, read: Callable[[], int]) -> None:
        """A counter that is read when it is scraped."""

        def collect() -> Iterable[Metric]:
            family = CounterMetricFamily(name, help_text, labels=LABELS)
            family.add_metric(self.labels, read())
            yield family

        self.registry.register(_Reader(collect))

    def read_labelled_gauge(
        self, name: str, help_text: str, label: str, *, read: Callable[[], dict[str, int]]
    ) -> None:
        """A gauge with one more label whose values are read when it is scraped."""

        def collect() -> Iterable[Metric]:
            family = GaugeMetricFamily(name, help_text, labels=(*LABELS, label))
            for value, count in read().items():
                family.add_metric((*self.labels, value), count)
            yield family

        self.registry.register(_Reader(collect))

    def read_counter(
        self, name: str, help_text: str, label: str, *, read: Callable[[], dict[str, int]]
    ) -> None:
        """A counter with one more label whose values are read when it is scraped."""

        def collect() -> Iterable[Metric]:
            family = CounterMetricFamily(name, help_text, labels=(*LABELS, label))
            for value, count in read().items():
                family.add_metric((*self.labels, value), count)
            yield family

        self.registry.register(_Reader(collect))


class _Reader(Collector):
    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterable[Metric]:
        """What Prometheus reads."""
        return self._collect()


class RequestMetrics:
    """Latencies and token counts of requests, as seen where their outputs leave the engine."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self._labels = metrics.labels
        self.ttft = metrics.histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", LATENCY_BUCKETS
        )
        self.itl = metrics.histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", LATENCY_BUCKETS
        )
        self.e2e = metrics.histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", LATENCY_BUCKETS
        )
        self.prompt_tokens = metrics.counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self.generation_tokens = metrics.counter("vllm:generation_tokens", "Tokens generated.")
        self.transfer_share = metrics.histogram(
            "tandem:kv_transfer_ttft_share",
            "Part of the time from arrival to the first token computed here that the pull took.",
            SHARE_BUCKETS,
        )
        self._success = metrics.labelled_counter(
            "vllm:request_success", "Requests that ended, by reason.", "finished_reason"
        )

    def start(self, request: GenerateRequest) -> "RequestTimer":
        """Begins the clock of one request."""
        self.prompt_tokens.inc(len(request.prompt_token_ids))
        return RequestTimer(self)

    def finished(self, reason: str) -> None:
        """Counts one ended request."""
        self._success.labels(*self._labels, reason).inc()


class RequestTimer:
    """The clock of one request."""

    def __init__(self, metrics: RequestMetrics) -> None:
        self._metrics = metrics
        self._start = time.monotonic()
        self._last: float | None = None
        self._second: float | None = None

    def observe(self, output: GenerateOutput) -> None:
        """Books one output."""
        now = time.monotonic()
        if self._last is None:
            self._metrics.ttft.observe(now - self._start)
        else:
            self._metrics.itl.observe(now - self._last)
            self._second = self._second or now
        self._last = now
        self._metrics.generation_tokens.inc(len(output.token_ids))
        if output.finish_reason is not None:
            self._metrics.e2e.observe(now - self._start)
            self._metrics.finished(output.finish_reason)
            if output.kv_transfer is not None and self._second is not None:
                seconds = output.kv_transfer.transfer_ms / 1e3
                self._metrics.transfer_share.observe(seconds / (self._second - self._start))
