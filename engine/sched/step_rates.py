"""The measured speed of a node's steps, which a router reckons with. Knows no clock."""

from collections.abc import Iterable

from engine.decaying_rate import DecayingRate
from engine.step import ScheduledRequest


class StepRates:
    """Tokens per second: `prefill` of steps that prefill, `decode` of steps that only decode."""

    def __init__(self) -> None:
        self.prefill = DecayingRate()
        self.decode = DecayingRate()

    def add(self, scheduled: Iterable[ScheduledRequest], seconds: float) -> None:
        """Counts one step that took so long."""
        counts = [len(item.token_ids) for item in scheduled]
        # A single token is a decode, or as cheap as one: the last one of a prompt that was hit.
        if num_prefilled := sum(count for count in counts if count > 1):
            self.prefill.add(num_prefilled, seconds)
        elif counts:
            self.decode.add(len(counts), seconds)
