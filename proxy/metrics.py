"""Every counter and histogram of the proxy, declared once. vLLM's names where vLLM has one."""

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from serving.kv_events.follower import SourceStats
from serving.log_writer import LOSSES
from serving.metrics import LOG_COUNTERS, ServerMetrics, Table

ROLE: Final = "proxy"
"""Nodes count the same requests under the same names, with roles of their own."""

REQUEST_GAUGES: Final[Table] = {
    "vllm:num_requests_running": ("num_running", "Requests that nodes work on, or soon will."),
    "vllm:num_requests_waiting": ("num_waiting", "Requests that wait for their turn."),
}
"""Of a `ProxyServer`."""


class ProxyMetrics:
    """One set per proxy, on the registry that its /metrics shows.

    `model_name` is empty until a node has told it.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        ProcessCollector(registry=registry)
        ServerMetrics(registry, {"role": ROLE}).read(LOSSES, counters=LOG_COUNTERS)
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
        self.broken_streams = self._counter(
            "tandem_proxy_broken_streams",
            "Answers whose decode node failed after their first token: continued on another one, "
            "or ended with an error.",
            "outcome",
        )
        # Zero from the start, or else an alert on an increase would miss the first one.
        for outcome in ("continued", "ended"):
            self.broken_streams.labels(outcome)
        self.routes = self._counter(
            "tandem_proxy_routes", "Choices of nodes, by the policy's reason.", "policy", "reason"
        )
        self.predicted_hit_tokens = self._counter(
            "tandem_proxy_predicted_hit_tokens",
            "Prompt tokens that the chosen nodes were expected to have cached.",
            "kind",
        )
        self.hit_tokens = self._counter(
            "tandem_proxy_hit_tokens", "Prompt tokens that they had, of the same requests.", "kind"
        )
        self.overpredicted_tokens = self._counter(
            "tandem_proxy_overpredicted_hit_tokens",
            "Prompt tokens that were expected and missing, of the same requests.",
            "kind",
        )
        self.available_nodes = self._gauge(
            "tandem_proxy_available_nodes", "Nodes that requests may be sent to.", "kind"
        )
        self.waiting_requests = self._gauge(
            "tandem_proxy_waiting_requests", "Requests that wait for their turn."
        )
        # The names of keys are no secrets. `outcome`: admitted, queue, or the name of a limit.
        self.key_requests = self._counter(
            "tandem_proxy_key_requests",
            "Requests by key: admitted, or refused by the limit that was reached.",
            *("key", "outcome"),
        )
        self.key_tokens = self._counter(
            "tandem_proxy_key_tokens",
            "Tokens by key, of prompts and generated ones.",
            *("key", "kind"),
        )
        self.resting_nodes = self._gauge(
            "tandem_proxy_resting_nodes",
            "Those of them whose requests failed in a row, so that others are preferred.",
            "kind",
        )

    def of_model(self, model_name: str) -> ServerMetrics:
        """Metrics under vLLM's names, whose labels are known once the model is."""
        self.model_name = model_name
        return ServerMetrics(self.registry, {"model_name": model_name, "role": ROLE})

    def count_hit(self, kind: str, predicted: int, real: int) -> None:
        """One request's cached tokens on one node, as expected and as the node reported them."""
        self.predicted_hit_tokens.labels(kind).inc(predicted)
        self.hit_tokens.labels(kind).inc(real)
        self.overpredicted_tokens.labels(kind).inc(max(0, predicted - real))

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)


class EventMetrics(Collector):
    """Counts of the nodes' KV events, read at each scrape.

    `label_of`: a node's label by its name, which is an address and not for everybody.
    """

    def __init__(
        self,
        label_of: Callable[[str], str],
        num_entries: Callable[[], Mapping[str, int]],
        stats: Callable[[], Mapping[str, SourceStats]],
    ) -> None:
        self._label_of = label_of
        self._num_entries = num_entries
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        entries = GaugeMetricFamily(
            "tandem_proxy_index_entries",
            "Hash blocks and checkpoints in the index, in all groups and tiers.",
            labels=("node",),
        )
        for name, number in self._num_entries().items():
            entries.add_metric((self._label_of(name),), number)
        yield entries
        stats = self._stats()
        for field, (kind, text) in EVENT_ROWS.items():
            family = kind(f"tandem_proxy_kv_events_{field}", text, labels=("node",))
            for name, known in stats.items():
                family.add_metric((self._label_of(name),), float(getattr(known, field)))
            yield family


EVENT_ROWS: Final = {
    "num_events": (CounterMetricFamily, "KV events received."),
    "num_garbage": (CounterMetricFamily, "Messages that could not be read."),
    "num_gaps_repaired": (CounterMetricFamily, "Gaps that a replay or a snapshot has filled."),
    "num_gaps_lost": (
        CounterMetricFamily,
        "Gaps after which the node's entries were cleared, or doubted.",
    ),
    "num_unplaced": (
        CounterMetricFamily,
        "Announced blocks of another project's engine that nothing is known to come before.",
    ),
    "lag_s": (GaugeMetricFamily, "Seconds from the publishing of the last batch to its arrival."),
    "is_synced": (GaugeMetricFamily, "1 while the index stands where the node does."),
}
