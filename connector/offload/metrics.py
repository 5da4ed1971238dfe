"""The metrics of the tiers, under vLLM's names where it has one."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from serving.metrics import Table


@dataclass(slots=True)
class OffloadStats:
    """Counters of one node. By tier: `host`, `disk`.

    `queries`: prompts that a tier could add to; `hits`: those of them that it did add to.
    `stored_bytes`, `loaded_bytes`: by tier. `dropped`: items that were evicted and kept nowhere, by
    cause. `failed_loads`, `failed_writes`, `bad_files`: by cause.
    """

    queries: int = 0
    hits: int = 0
    stored_bytes: Counter[str] = field(default_factory=Counter)
    loaded_bytes: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)
    failed_loads: Counter[str] = field(default_factory=Counter)
    failed_writes: Counter[str] = field(default_factory=Counter)
    bad_files: Counter[str] = field(default_factory=Counter)


COUNTERS: Final[Table] = {
    "tandem:kv_offload_queries": ("queries", "Prompts for which the tiers had an answer."),
    "tandem:kv_offload_hits": ("hits", "Prompts of which a tier loaded a part."),
    "vllm:kv_offload_store_bytes": ("stored_bytes", "Bytes that were written to a tier.", "tier"),
    "vllm:kv_offload_load_bytes": ("loaded_bytes", "Bytes that were read from a tier.", "tier"),
    "tandem:kv_offload_dropped_items": (
        "dropped",
        "Items that no tier keeps; backpressure: the disk was too slow to make room.",
        "cause",
    ),
    "tandem:kv_offload_failed_loads": ("failed_loads", "Loads that were computed again.", "cause"),
    "tandem:kv_offload_failed_writes": (
        "failed_writes",
        "Files that could not be written.",
        "cause",
    ),
    "tandem:kv_offload_bad_files": (
        "bad_files",
        "Files of the folder that were not taken in.",
        "cause",
    ),
}
INDEX_GAUGES: Final[Table] = {
    "tandem:kv_offload_items": ("num_items", "Items that are known, in the arena or in a tier."),
}
SLOT_GAUGES: Final[Table] = {
    "tandem:kv_offload_host_items": ("num_items", "Items in the host tier."),
    "tandem:kv_offload_host_free_units": ("num_free_units", "Units of the host tier without any."),
}
FOLDER_GAUGES: Final[Table] = {
    "tandem:kv_offload_disk_bytes": ("num_bytes", "Bytes of all nodes' files in the folder."),
}
