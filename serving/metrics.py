"""Metrics of servers and of a node's engine, declared once, under vLLM's name where vLLM has one.

A connector declares its own beside them (`connector/pd/metrics.py`). Numbers that a component
counts anyway are read when Prometheus asks; nothing is updated per step.
"""

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

from serving.log_writer import LOSSES

ENGINE: Final = "0"
"""vLLM's index of an engine in its process, which has one. A random name would make new series at
every start; Prometheus tells processes apart by their address."""

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


class ServerMetrics(Collector):
    """Metrics of one server on `registry`; every sample has `labels`."""

    def __init__(self, registry: CollectorRegistry, labels: Mapping[str, str]) -> None:
        self.registry = registry
        self.labels = labels
        self._names, self._values = tuple(labels), tuple(labels.values())
        self._readings: list[tuple[Callable[[], Family], Read]] = []
        self._histograms: list[Callable[[], HistogramMetricFamily]] = []
        self.registry.register(self)

    def histogram(self, name: str, help_text: str, buckets: tuple[float, ...]) -> Histogram:
        """A histogram with this server's labels bound."""
        metric = Histogram(name, help_text, self._names, registry=self.registry, buckets=buckets)
        return metric.labels(*self._values)

    def counter(self, name: str, help_text: str) -> Counter:
        """A counter with this server's labels bound."""
        return Counter(name, help_text, self._names, registry=self.registry).labels(*self._values)

    def counter_by(self, label: str, name: str, help_text: str) -> Callable[[str], Counter]:
        """A counter with one more label: call it with a value of `label`."""
        counter = Counter(name, help_text, (*self._names, label), registry=self.registry)
        return partial(counter.labels, *self._values)

    def info(self, name: str, help_text: str, values: Mapping[str, object]) -> None:
        """A gauge that is always 1 and says `values` in its labels."""
        gauge = Gauge(name, help_text, (*self._names, *values), registry=self.registry)
        gauge.labels(*self._values, *values.values()).set(1)

    def read(self, source: object, *, gauges: Table = NO_ROWS, counters: Table = NO_ROWS) -> None:
        """Reads attributes of `source` at each scrape.

        Rows are metric name -> (attribute path, help[, label]). With a label the attribute is a
        mapping, one number per value of the label.
        """
        for kind, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (path, help_text, *label) in table.items():
                family = partial(kind, name, help_text, labels=(*self._names, *label))
                self._readings.append((family, partial(attrgetter(path), source)))

    def read_counts(
        self, name: str, help_text: str, bounds: Sequence[float], *, read: ReadCounts
    ) -> None:
        """Reads a histogram at each scrape: how many up to each of `bounds`, how many beyond."""
        ends = (*(f"{float(bound)}" for bound in bounds), "+Inf")

        def make_family() -> HistogramMetricFamily:
            counts, total = read()
            buckets = list(zip(ends, accumulate(counts), strict=True))
            family = HistogramMetricFamily(name, help_text, labels=self._names)
            family.add_metric(self._values, buckets, total)
            return family

        self._histograms.append(make_family)

    def collect(self) -> Iterable[Metric]:
        yield from (make() for make in self._histograms)
        for make_family, read in self._readings:
            family, value = make_family(), read()
            if isinstance(value, Mapping):
                # A copy, since the engine thread may add a key meanwhile.
                for label, number in dict(value).items():
                    family.add_metric((*self._values, label), number)
            else:
                family.add_metric(self._values, value)
            yield family


class NodeMetrics(ServerMetrics):
    """The registry of one node; every sample has its served model name and `role`.

    So a sum over one role counts a request once, though proxy, P and D have all had it.
    """

    def __init__(self, model_name: str, role: str) -> None:
        labels = {"model_name": model_name, "engine": ENGINE, "role": role}
        super().__init__(CollectorRegistry(), labels)
        ProcessCollector(registry=self.registry)
        self.read(LOSSES, counters=LOG_COUNTERS)
