"""What a MultiConnector counts by child, under vLLM's names where it has one."""

from collections import Counter
from collections.abc import Iterable
from typing import Final

from serving.metrics import Table


class MultiStats:
    """Numbers by child; `queries` = `hits` + `misses` once all requests have ended.

    `queries`: prompts that a child was asked about. `hits`: those to whose load it gave a part.
    `hit_tokens`: the tokens that it filled in, each of one child only. `pending_loads`: loads under
    way.
    """

    def __init__(self, children: Iterable[str]) -> None:
        nothing = dict.fromkeys(children, 0)
        self.queries = Counter(nothing)
        self.hits = Counter(nothing)
        self.misses = Counter(nothing)
        self.hit_tokens = Counter(nothing)
        self.pending_loads = Counter(nothing)


COUNTERS: Final[Table] = {
    "vllm:kv_connector_queries": ("queries", "Prompts that a connector was asked.", "connector"),
    "vllm:kv_connector_hits": ("hits", "Prompts that it loaded a part of.", "connector"),
    "vllm:kv_connector_misses": ("misses", "Prompts that it loaded nothing of.", "connector"),
    "vllm:kv_connector_hit_tokens": ("hit_tokens", "Prompt tokens that it loaded.", "connector"),
}
GAUGES: Final[Table] = {
    "vllm:kv_connector_pending_loads": ("pending_loads", "Loads under way.", "connector"),
}
