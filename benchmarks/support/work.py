"""Work for one engine that is timed: a prefill, or decoding at a batch size."""

import msgspec

from benchmarks.support.models import random_prompts
from benchmarks.support.tandem_engine import Timing

PREFILL, DECODE = "prefill", "decode"
BATCHES = (1, 8, 32)
PROMPT_TOKENS = 64
PREFILL_TOKENS = 2048


class Work(msgspec.Struct, frozen=True):
    """`new_tokens`: how many every prompt gets."""

    phase: str
    batch: int
    new_tokens: int

    @property
    def name(self) -> str:
        """`decode, batch 8`: the same for all models."""
        size = f"batch {self.batch}" if self.phase == DECODE else f"{PREFILL_TOKENS} tokens"
        return f"{self.phase}, {size}"

    @property
    def prompt_tokens(self) -> int:
        """Tokens of every prompt."""
        return PROMPT_TOKENS if self.phase == DECODE else PREFILL_TOKENS

    @property
    def step_tokens(self) -> int:
        """Tokens of one pass over the weights."""
        return self.batch if self.phase == DECODE else PREFILL_TOKENS

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Drawn from `vocabulary` ids; the same each time, so the same for both sides."""
        return random_prompts(
            self.batch, self.prompt_tokens, seed=self.batch, vocabulary=vocabulary
        )

    def rate(self, timing: Timing) -> float:
        """Tokens per second of the phase that is measured."""
        if self.phase == DECODE:
            return timing.decode_tokens / timing.decode_s
        return PREFILL_TOKENS / timing.first_s
