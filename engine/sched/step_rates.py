"""The measured speed and size of a node's steps. Knows no clock."""

from bisect import bisect_left
from collections.abc import Iterable
from typing import Final

from engine.sched.decaying_rate import DecayingRate
from engine.step import ScheduledRequest

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
