"""What an OffloadConnector counts: plain numbers since start, read at every scrape."""

from collections import Counter
from dataclasses import dataclass, field


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
