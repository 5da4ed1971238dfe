"""The scheduler's counters and the measured speed of steps: plain numbers, read at every scrape.

Knows no metric by name, no reader and no clock.
"""

import threading
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import exp
from typing import Final

from engine.request import Request
from engine.step import ScheduledRequest

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
    checkpoints_written: Counter[str] = field(default_factory=Counter)
    recomputed_tokens: Counter[str] = field(default_factory=Counter)
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
            num_known = request.num_known_tokens - start
            self.recomputed_tokens[request.recompute_cause] += min(num_tokens, num_known)
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
        prompt = request.num_prompt_tokens
        self.checkpoints_written.update(
            "decode" if position > prompt else "prefill" for position in positions
        )


STEP_BUCKETS: Final = (1, *(2**power for power in range(3, 15)))
"""Tokens: vLLM's of `vllm:iteration_tokens_total`."""


class StepRates:
    """Tokens per second: `prefill` of steps that prefill, `decode` of steps that only decode.

    `num_steps`: by number of tokens, up to each of `STEP_BUCKETS` and beyond; `num_tokens`: of all.
    """

    def __init__(self) -> None:
        self.num_steps = [0] * (len(STEP_BUCKETS) + 1)
        self.num_tokens = 0
        self.prefill = DecayingRate()
        self.decode = DecayingRate()

    def sizes(self) -> tuple[list[int], int]:
        """`num_steps` and `num_tokens`; from any thread, the sum may be one step ahead."""
        return self.num_steps.copy(), self.num_tokens

    def add(self, scheduled: Iterable[ScheduledRequest], seconds: float) -> None:
        """Counts one step that took so long."""
        counts = [len(item.token_ids) for item in scheduled]
        if counts:
            num_tokens = sum(counts)
            self.num_steps[bisect_left(STEP_BUCKETS, num_tokens)] += 1
            self.num_tokens += num_tokens
        # A single token is a decode, or as cheap as one: the last one of a prompt that was hit.
        if num_prefilled := sum(count for count in counts if count > 1):
            self.prefill.add(num_prefilled, seconds)
        elif counts:
            self.decode.add(len(counts), seconds)


HORIZON_S: Final = 30.0


class DecayingRate:
    """Amount over time, both fading with the time that is added; from any thread.

    `per_s`: 0 until something is added. Weights fall to 1/e over `horizon_s` of added seconds.
    """

    def __init__(self, horizon_s: float = HORIZON_S) -> None:
        self.per_s = 0.0
        self._horizon_s = horizon_s
        self._amount = 0.0
        self._seconds = 0.0
        self._lock = threading.Lock()

    def add(self, amount: float, seconds: float) -> None:
        """`amount` took `seconds`; ignored where the clock saw no time pass."""
        if seconds <= 0.0:
            return
        with self._lock:
            kept = exp(-seconds / self._horizon_s)
            self._amount = self._amount * kept + amount
            self._seconds = self._seconds * kept + seconds
            self.per_s = self._amount / self._seconds
