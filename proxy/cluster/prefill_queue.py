"""The prompts that one node computes for this proxy, and what is left of them at any moment."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count


class PrefillQueue:
    """Nodes compute prompts in their order, so only the oldest one has been begun.

    Without that a long prompt would count in full until its end, and its node look busy when it
    is nearly free.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._numbers = count()
        self._tokens: dict[int, int] = {}
        self._begun_at = 0.0

    def __len__(self) -> int:
        return len(self._tokens)

    @contextmanager
    def carrying(self, num_tokens: int) -> Iterator[None]:
        """`num_tokens` more tokens are to compute, until the block ends at the latest."""
        if num_tokens <= 0:
            yield
            return
        number = next(self._numbers)
        if not self._tokens:
            self._begun_at = self._clock()
        self._tokens[number] = num_tokens
        try:
            yield
        finally:
            # The next one begins now.
            if next(iter(self._tokens)) == number:
                self._begun_at = self._clock()
            del self._tokens[number]

    def num_tokens_left(self, tokens_per_s: float) -> int:
        """Prompt tokens left at that rate; only the oldest prompt counts as begun, even if late."""
        if not self._tokens:
            return 0
        oldest = next(iter(self._tokens.values()))
        computed = int(tokens_per_s * (self._clock() - self._begun_at))
        return sum(self._tokens.values()) - min(oldest, computed)
