"""The metrics of the tiers, under vLLM's names where it has one."""

from typing import Final

from serving.metrics import Table

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
