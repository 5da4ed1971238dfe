"""The metrics of hand-overs, declared once, in the names and buckets of vLLM's NIXL connector."""

from typing import Final

from engine.sched.stats import DecayingRate
from serving.metrics import NodeMetrics, Table

# vLLM's buckets (vllm/distributed/kv_transfer/kv_connector/v1/nixl): seconds, bytes, spans.
POST_BUCKETS: Final = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
TRANSFER_BUCKETS: Final = POST_BUCKETS[1:]
BYTES_BUCKETS: Final = tuple(float(2**power) for power in range(11, 35, 2))
SPANS_BUCKETS: Final = (
    *(10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0),
    *(1e3, 2e3, 4e3, 1e4, 2e4, 5e4),
)

# What the `Producer`, the `LeaseTable` and the `PdWorker` count, for `NodeMetrics.read`.
LEASE_GAUGES: Final[Table] = {
    "tandem:held_lease_bytes": (
        "num_held_bytes",
        "Bytes of finished requests that are held under a lease.",
    ),
}
LEASE_COUNTERS: Final[Table] = {
    "vllm:nixl_num_kv_expired_reqs": (
        "num_expired",
        "Leases that ended before anybody released them.",
    ),
    "vllm:nixl_num_notifications_after_expiry": (
        "num_late_releases",
        "Releases of leases that had ended, or never were.",
    ),
    "tandem:held_turns_taken_back": (
        "num_taken_back",
        "Requests held for a next turn that were let go early because memory was short.",
    ),
}
PULL_GAUGES: Final[Table] = {
    "vllm:num_requests_kv_fetch_by_stage": (
        "pulls_by_stage",
        "Requests that wait for a pull, by stage.",
        "stage",
    ),
}


class TransferMetrics:
    """Costs and failures of hand-overs.

    The names are the same for every transport, so that dashboards made for vLLM work unchanged.
    `link`: bytes per second of one pull, for the proxy's choices.
    """

    def __init__(self, metrics: NodeMetrics) -> None:
        self.link = DecayingRate()
        self.seconds = metrics.histogram(
            "vllm:nixl_xfer_time_seconds", "Duration of one pull.", TRANSFER_BUCKETS
        )
        self.post_seconds = metrics.histogram(
            "vllm:nixl_post_time_seconds",
            "Time until the read of one pull was under way; with shm the read itself.",
            POST_BUCKETS,
        )
        self.bytes = metrics.histogram(
            "vllm:nixl_bytes_transferred", "Bytes of one pull.", BYTES_BUCKETS
        )
        self.spans = metrics.histogram(
            "vllm:nixl_num_descriptors", "Spans of one pull.", SPANS_BUCKETS
        )
        self.failed = metrics.counter(
            "vllm:nixl_num_failed_transfers",
            "Remote prefills that could not be claimed or pulled for a reason on the way.",
        )
        self.failed_notifications = metrics.counter(
            "vllm:nixl_num_failed_notifications",
            "Renewals and releases that did not reach the prefill node.",
        )
        self.bytes_by_kind = metrics.counter_by(
            "kind", "tandem:kv_transfer_bytes", "Bytes pulled, by kind of cache."
        )
        self.hand_over_failures = metrics.counter_by(
            "cause",
            "tandem:kv_hand_over_failures",
            "Remote prefills that were computed again or refused here, by cause.",
        )
        self.return_pulls_skipped = metrics.counter_by(
            "cause",
            "tandem:kv_return_pulls_skipped",
            "Turns whose beginning was computed here although another node had named it, by cause.",
        )
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
        self.differing = metrics.counter_by(
            "kind",
            "tandem:kv_verification_failures",
            "Blocks or states that differed from P's after a read, by kind of cache.",
        )
        # Zero from the start, or else an alert on an increase would miss the first one.
        for kind in ("attention", "state"):
            self.differing(kind)

    def pulled(self, seconds: float, *, spans: int, attention_bytes: int, state_bytes: int) -> None:
        self.link.add(attention_bytes + state_bytes, seconds)
        self.seconds.observe(seconds)
        self.bytes.observe(attention_bytes + state_bytes)
        self.spans.observe(spans)
        self.bytes_by_kind("attention").inc(attention_bytes)
        self.bytes_by_kind("state").inc(state_bytes)
