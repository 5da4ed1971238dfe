"""What hand-overs cost and how they fail, declared once, in the names of vLLM's NIXL connector."""

from collections.abc import Callable

from engine.metrics import BYTES_BUCKETS, COUNT_BUCKETS, LATENCY_BUCKETS, NodeMetrics


class TransferMetrics:
    """What hand-overs cost and how they fail, in the names of vLLM's NIXL connector.

    The names are the same for every transport, so that dashboards made for vLLM work unchanged.
    """

    def __init__(self, metrics: NodeMetrics) -> None:
        self._metrics = metrics
        self._labels = metrics.labels
        self.seconds = metrics.histogram(
            "vllm:nixl_xfer_time_seconds", "Duration of one pull.", LATENCY_BUCKETS
        )
        self.post_seconds = metrics.histogram(
            "vllm:nixl_post_time_seconds",
            "Time until the read of one pull was under way; with shm the read itself.",
            LATENCY_BUCKETS,
        )
        self.bytes = metrics.histogram(
            "vllm:nixl_bytes_transferred", "Bytes of one pull.", BYTES_BUCKETS
        )
        self.spans = metrics.histogram(
            "vllm:nixl_num_descriptors", "Spans of one pull.", COUNT_BUCKETS
        )
        self.failed = metrics.counter(
            "vllm:nixl_num_failed_transfers",
            "Remote prefills that could not be claimed or pulled for a reason on the way.",
        )
        self.failed_notifications = metrics.counter(
            "vllm:nixl_num_failed_notifications",
            "Renewals and releases that did not reach the prefill node.",
        )
        self._by_kind = metrics.labelled_counter(
            "tandem:kv_transfer_bytes", "Bytes pulled, by kind of cache.", "kind"
        )
        self._hand_over_failures = metrics.labelled_counter(
            "tandem:kv_hand_over_failures",
            "Remote prefills that were computed again or refused here, by cause.",
            "cause",
        )
        self._not_pulled = metrics.labelled_counter(
            "tandem:kv_return_pulls_skipped",
            "Turns whose beginning was computed here although another node had named it, by cause.",
            "cause",
        )
        self._declare_verification(metrics)

    def _declare_verification(self, metrics: NodeMetrics) -> None:
        self.verified_bytes = metrics.counter(
            "tandem:kv_verified_bytes", "Bytes pulled that were found equal to P's."
        )
        self.verification_retries = metrics.counter(
            "tandem:kv_verification_retries", "Pulls that read differing blocks once more."
        )
        self.late_reads = metrics.counter(
            "tandem:kv_late_reads", "Pulls whose lease had ended before the read did."
        )
        self.unverified = metrics.counter(
            "tandem:kv_unverified_transfers", "Pulls made without a comparison of digests."
        )
        self._differing = metrics.labelled_counter(
            "tandem:kv_verification_failures",
            "Blocks or states that differed from P's after a read, by kind of cache.",
            "kind",
        )

    def differed(self, kind: str, blocks: int) -> None:
        """Books blocks of one kind (`attention` or `state`) that arrived otherwise than P's are."""
        self._differing.labels(*self._labels, kind).inc(blocks)

    def hand_over_failed(self, cause: str) -> None:
        """Books a prefill that a peer made in vain, and why."""
        self._hand_over_failures.labels(*self._labels, cause).inc()

    def not_pulled(self, cause: str) -> None:
        """Books a turn before that is not pulled, and why."""
        self._not_pulled.labels(*self._labels, cause).inc()

    def read_stages(self, read: Callable[[], dict[str, int]]) -> None:
        """Where pulls stand, read when Prometheus asks."""
        self._metrics.read_labelled_gauge(
            "vllm:num_requests_kv_fetch_by_stage",
            "Requests that wait for a pull, by stage.",
            "stage",
            read=read,
        )

    def pulled(self, seconds: float, *, spans: int, attention_bytes: int, state_bytes: int) -> None:
        """Books one successful pull."""
        self.seconds.observe(seconds)
        self.bytes.observe(attention_bytes + state_bytes)
        self.spans.observe(spans)
        self._by_kind.labels(*self._labels, "attention").inc(attention_bytes)
        self._by_kind.labels(*self._labels, "state").inc(state_bytes)
