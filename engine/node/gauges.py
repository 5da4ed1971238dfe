"""Gauges and counters of a running engine, read when Prometheus asks.

vLLM's names where it has one; Mamba states, checkpoints and held prefills are new.
"""

from engine.core import EngineCore
from engine.kv_cache.manager import KVCacheManager
from engine.metrics import NodeMetrics
from engine.sched.scheduler import Scheduler
from engine.sched.stats import SchedulerStats


def register_gauges(metrics: NodeMetrics, core: EngineCore) -> None:
    """Everything below, for one node."""
    _register_requests(metrics, core.scheduler)
    _register_memory(metrics, core.scheduler.cache)
    _register_reuse(metrics, core.scheduler.stats)
    _register_losses(metrics, core.scheduler.stats)


def _register_requests(metrics: NodeMetrics, scheduler: Scheduler) -> None:
    metrics.read_gauge(
        "vllm:num_requests_running", "Requests with blocks.", lambda: scheduler.num_running
    )
    metrics.read_gauge(
        "vllm:num_requests_waiting", "Requests without blocks.", lambda: scheduler.num_waiting
    )
    metrics.read_gauge(
        "tandem:held_requests", "Finished requests held under a lease.", lambda: scheduler.num_held
    )


def _register_memory(metrics: NodeMetrics, cache: KVCacheManager) -> None:
    metrics.read_gauge("vllm:kv_cache_usage_perc", "Share of units in use.", lambda: cache.usage)
    metrics.read_gauge(
        "tandem:mamba_states", "Units with a Mamba state in use.", lambda: cache.num_states
    )
    metrics.read_gauge(
        "tandem:mamba_idle_states",
        "Units with a Mamba state that is kept for reuse and not in use.",
        lambda: cache.num_idle_states,
    )


def _register_reuse(metrics: NodeMetrics, stats: SchedulerStats) -> None:
    metrics.read_total(
        "vllm:prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda: stats.prefix_queries,
    )
    metrics.read_total(
        "vllm:prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda: stats.prefix_hits,
    )
    metrics.read_total(
        "vllm:external_prefix_cache_queries",
        "Prompt tokens of remote prefills that were not here.",
        lambda: stats.external_queries,
    )
    metrics.read_total(
        "vllm:external_prefix_cache_hits",
        "Prompt tokens that were pulled, or are being pulled.",
        lambda: stats.external_hits,
    )
    metrics.read_total(
        "tandem:mamba_checkpoint_hits",
        "Requests that started from a kept Mamba state.",
        lambda: stats.checkpoint_hits,
    )
    metrics.read_counter(
        "tandem:mamba_checkpoints_written",
        "Mamba states copied for reuse, by the phase of their request.",
        "phase",
        read=lambda: dict(stats.checkpoints_written),
    )


def _register_losses(metrics: NodeMetrics, stats: SchedulerStats) -> None:
    metrics.read_counter(
        "vllm:prompt_tokens_recomputed",
        "Tokens computed again, by cause; no_checkpoint: their attention blocks were here.",
        "cause",
        read=lambda: dict(stats.recomputed_tokens),
    )
    metrics.read_counter(
        "vllm:num_preemptions",
        "Requests that lost their blocks.",
        "reason",
        read=lambda: {"no_free_units": stats.num_preemptions},
    )
