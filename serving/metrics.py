"""The metrics of a node's engine, declared once, under vLLM's name where vLLM has one.

A connector declares its own beside them (`connector/pd/metrics.py`). Numbers that a component
counts anyway are read when Prometheus asks; nothing is updated per step.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from operator import attrgetter
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from engine.errors import EngineGenerateError, KVLoadError
from engine.types import FinishReason, GenerateOutput, GenerateRequest
from serving.log_writer import LOSSES

LABELS = ("model_name", "engine", "role")
ENGINE: Final = "0"
"""vLLM's index of an engine in its process, which has one. Prometheus tells processes apart itself:
a name that were new at every start would make new series at every start."""

# vLLM's buckets for vLLM's names (vllm/v1/metrics/loggers.py), in seconds. Histograms of nodes, of
# the proxy and of vLLM can be added up only if all of them have the same buckets.
TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BUCKETS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICE_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
SHARE_BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)

ENGINE_FAILURES: Final = (EngineGenerateError.__name__, KVLoadError.__name__)

Table = Mapping[str, tuple[str, ...]]
NO_ROWS: Final[Table] = {}

# What an `engine.sched.scheduler.Scheduler` counts, as tables for `NodeMetrics.read`.
SCHEDULER_GAUGES: Final[Table] = {
    "vllm:num_requests_running": ("num_running", "Requests with blocks."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests without blocks."),
    "vllm:kv_cache_usage_perc": ("cache.usage", "Share of units in use."),
    "tandem:held_requests": ("num_held", "Finished requests held under a lease."),
    "tandem:mamba_states": ("cache.states.num_used", "Units with a Mamba state in use."),
    "tandem:mamba_idle_states": (
        "cache.states.num_idle",
        "Units with a Mamba state that is kept for reuse and not in use.",
    ),
}
GRAMMAR_GAUGES: Final[Table] = {
    "tandem:grammar_sequences": ("num_sequences", "Outputs that follow a grammar."),
    "tandem:grammar_processes": ("num_processes", "Processes of grammars, idle ones included."),
    "tandem:grammar_memory_bytes": ("num_bytes", "Memory of all grammar processes."),
}
SCHEDULER_COUNTERS: Final[Table] = {
    "vllm:prefix_cache_queries": (
        "stats.prefix_queries",
        "Prompt tokens looked up in the prefix cache.",
    ),
    "vllm:prefix_cache_hits": ("stats.prefix_hits", "Prompt tokens found in the prefix cache."),
    "vllm:external_prefix_cache_queries": (
        "stats.external_queries",
        "Prompt tokens of remote prefills that were not here.",
    ),
    "vllm:external_prefix_cache_hits": (
        "stats.external_hits",
        "Prompt tokens that were pulled, or are being pulled.",
    ),
    "tandem:mamba_checkpoint_hits": (
        "stats.checkpoint_hits",
        "Requests that started from a kept Mamba state.",
    ),
    "tandem:mamba_checkpoints_written": (
        "stats.checkpoints_written",
        "Mamba states copied for reuse, by the phase of their request.",
        "phase",
    ),
    "vllm:prompt_tokens_recomputed": (
        "stats.recomputed_tokens",
        "Tokens computed again, by cause; no_checkpoint: their attention blocks were here.",
        "cause",
    ),
    "vllm:prompt_tokens_by_source": (
        "stats.prompt_tokens",
        "Prompt tokens by where they came from; counted when a prompt is complete.",
        "source",
    ),
    "vllm:prompt_tokens_cached": (
        "stats.num_cached_prompt_tokens",
        "Prompt tokens that were not computed here: cached, or brought by a connector.",
    ),
    "tandem:prefix_tokens_lost_to_state": (
        "stats.tokens_lost_to_state",
        "Prompt tokens whose attention was cached and that are computed again for want of a Mamba "
        "state.",
    ),
    "vllm:num_preemptions": ("stats.preemptions", "Requests that lost their blocks.", "reason"),
}
EVENT_COUNTERS: Final[Table] = {
    "tandem:kv_event_batches_dropped": (
        "num_dropped",
        "Batches of KV events that were not sent, since too many waited; others fetch snapshots.",
    ),
}
LOG_COUNTERS: Final[Table] = {
    "tandem:log_lines_dropped": (
        "num_dropped",
        "Lines of the log that standard error did not take: a full disk, or nobody who reads.",
    ),
}

Family = GaugeMetricFamily | CounterMetricFamily
Read = Callable[[], float | Mapping[str, float]]
ReadCounts = Callable[[], tuple[Sequence[int], float]]
"""Numbers of observations by bucket, each for itself, and the sum of what was observed."""


class NodeMetrics(Collector):
    """The registry of one node; every sample has its served model name and `role`.

    So a sum over one role counts a request once, though proxy, P and D have all had it.
    """

    def __init__(self, model_name: str, role: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.labels = (model_name, ENGINE, role)
        self._readings: list[tuple[Callable[[], Family], Read]] = []
        self._histograms: list[Callable[[], HistogramMetricFamily]] = []
        self.read(LOSSES, counters=LOG_COUNTERS)
        self.registry.register(self)

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram with this node's labels bound."""
        metric = Histogram(name, help_text, LABELS, registry=self.registry, buckets=buckets)
        return metric.labels(*self.labels)

    def counter(self, name: str, help_text: str) -> Counter:
        """A counter with this node's labels bound."""
        return Counter(name, help_text, LABELS, registry=self.registry).labels(*self.labels)

    def counter_by(self, label: str, name: str, help_text: str) -> Callable[[str], Counter]:
        """A counter with one more label: call it with a value of `label`."""
        counter = Counter(name, help_text, (*LABELS, label), registry=self.registry)
        return partial(counter.labels, *self.labels)

    def info(self, name: str, help_text: str, values: Mapping[str, object]) -> None:
        """A gauge that is always 1 and says `values` in its labels."""
        gauge = Gauge(name, help_text, (*LABELS, *values), registry=self.registry)
        gauge.labels(*self.labels, *values.values()).set(1)

    def read(self, source: object, *, gauges: Table = NO_ROWS, counters: Table = NO_ROWS) -> None:
        """Reads attributes of `source` at each scrape.

        Rows are metric name -> (attribute path, help[, label]). With a label the attribute is a
        mapping, one number per value of the label.
        """
        for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (path, help_text, *label) in table.items():
                family = partial(kind, name, help_text, labels=(*LABELS, *label))
                self._readings.append((family, partial(attrgetter(path), source)))

    def read_counts(
        self, name: str, help_text: str, bounds: Sequence[float], *, read: ReadCounts
    ) -> None:
        """Reads a histogram at each scrape: how many up to each of `bounds`, how many beyond."""
        ends = (*(f"{float(bound)}" for bound in bounds), "+Inf")

        def make_family() -> HistogramMetricFamily:
            counts, total = read()
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family = HistogramMetricFamily(name, help_text, labels=LABELS)
            family.add_metric(self.labels, buckets, total)
            return family

        self._histograms.append(make_family)

    def collect(self) -> Iterable[Metric]:
        yield from (make() for make in self._histograms)
        for make_family, read in self._readings:
            family, value = make_family(), read()
            if isinstance(value, Mapping):
                # A copy, since the engine thread may add a key meanwhile.
                for label, number in dict(value).items():
                    family.add_metric((*self.labels, label), number)
            else:
                family.add_metric(self.labels, value)
            yield family


class RequestMetrics:
    """Latencies and token counts of requests, as seen where their outputs leave the engine."""

    def __init__(self, metrics: NodeMetrics) -> None:
        self.ttft = metrics.histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self.itl = metrics.histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", ITL_BUCKETS
        )
        self.e2e = metrics.histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS
        )
        self.prompt_tokens = metrics.counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self.generation_tokens = metrics.counter("vllm:generation_tokens", "Tokens generated.")
        self.transfer_share = metrics.histogram(
            "tandem:kv_transfer_ttft_share",
            "Part of the time from arrival to the first token computed here that the pull took.",
            SHARE_BUCKETS,
        )
        self.finished = metrics.counter_by(
            "finished_reason", "vllm:request_success", "Requests that ended, by reason."
        )
        self.prompt_lengths = metrics.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS
        )
        self.generation_lengths = metrics.histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", LENGTH_BUCKETS
        )
        self.queue_seconds = metrics.histogram(
            "vllm:request_queue_time_seconds", "Arrival to first blocks.", E2E_BUCKETS
        )
        self.prefill_seconds = metrics.histogram(
            "vllm:request_prefill_time_seconds", "First blocks to first token.", E2E_BUCKETS
        )
        self.decode_seconds = metrics.histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", E2E_BUCKETS
        )
        self.inference_seconds = metrics.histogram(
            "vllm:request_inference_time_seconds", "First blocks to last token.", E2E_BUCKETS
        )
        self.seconds_per_token = metrics.histogram(
            "vllm:request_time_per_output_token_seconds",
            "First token to last token, for each token after the first.",
            ITL_BUCKETS,
        )
        self.longest_choices = metrics.histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens generated for a request, each choice for itself.",
            LENGTH_BUCKETS,
        )
        self.max_tokens = metrics.histogram(
            "vllm:request_params_max_tokens", "Most tokens that a request asks for.", LENGTH_BUCKETS
        )
        self.choices = metrics.histogram(
            "vllm:request_params_n", "Choices that a request asks for.", CHOICE_BUCKETS
        )

    def start(self, request: GenerateRequest) -> "RequestTimer":
        self.prompt_tokens.inc(len(request.prompt_token_ids))
        self.max_tokens.observe(request.sampling.max_tokens)
        if request.origin.num_choices:
            self.choices.observe(request.origin.num_choices)
        return RequestTimer(self, len(request.prompt_token_ids))


class RequestTimer:
    """The clock of one request."""

    def __init__(self, metrics: RequestMetrics, num_prompt_tokens: int) -> None:
        self._metrics = metrics
        self._num_prompt_tokens = num_prompt_tokens
        self._num_tokens = 0
        self._start = time.monotonic()
        self._first: float | None = None
        self._last: float | None = None
        self._second: float | None = None

    def observe(self, output: GenerateOutput) -> None:
        """An output leaves the engine now."""
        now = time.monotonic()
        self._num_tokens += len(output.token_ids)
        if self._last is None:
            self._first = now
            self._metrics.ttft.observe(now - self._start)
        else:
            self._metrics.itl.observe(now - self._last)
            self._second = self._second or now
        self._last = now
        self._metrics.generation_tokens.inc(len(output.token_ids))
        if output.finish_reason is not None:
            self._metrics.e2e.observe(now - self._start)
            self._metrics.finished(output.finish_reason).inc()
            self._observe_queue(output.queue_s)
            moved = output.kv_transfer
            if moved is not None and not moved.cause and self._second is not None:
                seconds = moved.transfer_ms / 1e3
                self._metrics.transfer_share.observe(seconds / (self._second - self._start))

    def _observe_queue(self, queue_s: float | None) -> None:
        if queue_s is None or self._first is None:
            return
        self._metrics.queue_seconds.observe(queue_s)
        self._metrics.inference_seconds.observe(time.monotonic() - self._start - queue_s)
        # D sends P's token before it has blocks: there is no prefill to time.
        if (prefill_s := self._first - self._start - queue_s) > 0:
            self._metrics.prefill_seconds.observe(prefill_s)

    def ended(self, outcome: str) -> None:
        """The request is over; `outcome` is a finish reason or the name of an error."""
        self._metrics.prompt_lengths.observe(self._num_prompt_tokens)
        self._metrics.generation_lengths.observe(self._num_tokens)
        self._metrics.longest_choices.observe(self._num_tokens)
        if self._first is not None and self._last is not None:
            decode_s = self._last - self._first
            self._metrics.decode_seconds.observe(decode_s)
            if self._num_tokens > 1:
                self._metrics.seconds_per_token.observe(decode_s / (self._num_tokens - 1))
        if outcome in ENGINE_FAILURES:
            self._metrics.finished(FinishReason.ERROR).inc()
