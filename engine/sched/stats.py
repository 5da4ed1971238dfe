"""The scheduler's counters: plain numbers since start, read at every scrape.

Knows no metric by name and no reader.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.request import Request

NO_CHECKPOINT = "no_checkpoint"
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")


@dataclass(slots=True)
class SchedulerStats:
    """Counters since start; the node's metrics read differences.

    A request counts at its first start only. `prefix_queries`, `prefix_hits`: prompt tokens looked
    up, and found here. `external_queries`, `external_hits`: where the connector had an answer,
    tokens not found here, and those of them that it loads. `checkpoint_hits`: requests that started
    from a kept state. `checkpoints_written`: states copied for reuse, by phase of the request.
    `recomputed_tokens`: by cause, counted when they are computed. `prompt_tokens`: by source, as
    vLLM names them; counted once, when a prompt is complete, so that they add up to its length.
    `tokens_lost_to_state`: those of prompts with attention here that no state lets them start from.
    """

    num_preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    checkpoint_hits: int = 0
    checkpoints_written: dict[str, int] = field(default_factory=dict)
    recomputed_tokens: dict[str, int] = field(default_factory=dict)
    tokens_lost_to_state: int = 0
    prompt_tokens: Counter[str] = field(default_factory=lambda: Counter(dict.fromkeys(SOURCES, 0)))

    @property
    def preemptions(self) -> dict[str, int]:
        """Preemptions by reason."""
        return {"no_free_units": self.num_preemptions}

    @property
    def num_cached_prompt_tokens(self) -> int:
        """Prompt tokens that were found here or brought by a connector."""
        return self.prompt_tokens.total() - self.prompt_tokens["local_compute"]

    def started(self, request: Request, num_hit: int, num_external: int | None) -> None:
        """Counts the sources of a starting prompt; `num_external` None: no connector was asked."""
        self.prefix_queries += request.num_prompt_tokens
        self.prefix_hits += num_hit
        if num_external is not None:
            self.external_queries += request.num_prompt_tokens - num_hit
            self.external_hits += num_external

    def computed(self, request: Request, num_tokens: int) -> None:
        """Counts the next `num_tokens` of a request; call before `request` counts them."""
        start, prompt = request.num_computed_tokens, request.num_prompt_tokens
        if start < request.num_known_tokens:
            self._recomputed(request, num_tokens)
        if start + num_tokens < prompt or request.is_counted:
            return
        request.is_counted = True
        local = min(request.num_local_tokens, prompt)
        external = max(min(request.num_loading_tokens, prompt) - local, 0)
        self.prompt_tokens["local_cache_hit"] += local
        self.prompt_tokens["external_kv_transfer"] += external
        self.prompt_tokens["local_compute"] += prompt - local - external

    def wrote(self, request: Request, positions: Iterable[int]) -> None:
        """Counts states of `request` kept after `positions` tokens, by phase."""
        for position in positions:
            phase = "decode" if position > request.num_prompt_tokens else "prefill"
            self.checkpoints_written[phase] = self.checkpoints_written.get(phase, 0) + 1

    def _recomputed(self, request: Request, num_tokens: int) -> None:
        num_known = request.num_known_tokens - request.num_computed_tokens
        cause, again = request.recompute_cause, min(num_tokens, num_known)
        self.recomputed_tokens[cause] = self.recomputed_tokens.get(cause, 0) + again
