"""Gauges and counters of a running engine, read when Prometheus asks."""

from engine.core import EngineCore
from engine.metrics import NodeMetrics


def register_gauges(metrics: NodeMetrics, core: EngineCore) -> None:
    """vLLM's names where it has one; Mamba states and held prefills are new."""
    scheduler = core.scheduler
    cache, stats = scheduler.cache, scheduler.stats
    metrics.read_gauge(
        "vllm:num_requests_running", "Requests with blocks.", lambda: scheduler.num_running
    )
    metrics.read_gauge(
        "vllm:num_requests_waiting", "Requests without blocks.", lambda: scheduler.num_waiting
    )
    metrics.read_gauge("vllm:kv_cache_usage_perc", "Share of units in use.", lambda: cache.usage)
    metrics.read_gauge("tandem:mamba_states", "Mamba states in use.", lambda: cache.num_states)
    metrics.read_gauge(
        "tandem:held_requests", "Prefills held under a lease.", lambda: scheduler.num_held
    )
    metrics.read_counter(
        "vllm:prompt_tokens_recomputed",
        "Tokens computed again, by cause.",
        "cause",
        read=lambda: dict(stats.recomputed_tokens),
    )
    metrics.read_counter(
        "vllm:num_preemptions",
        "Requests that lost their blocks.",
        "reason",
        read=lambda: {"no_free_units": stats.num_preemptions},
    )
