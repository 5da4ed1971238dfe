"""The state of one request on its way through the cluster. Knows no node by more than its name."""

import asyncio
from dataclasses import dataclass, field

from engine.errors import DeadlineExceededError
from engine.types import GenerateRequest


@dataclass(slots=True)
class Journey:
    """`deadline` is in event-loop time; `failed` names the nodes that must not be tried again."""

    request: GenerateRequest
    deadline: float
    failed: set[str] = field(default_factory=set)
    num_attempts: int = 0
    num_tokens: int = 0
    is_done: bool = False

    def remaining_s(self) -> float:
        """Raises `DeadlineExceededError` when nothing remains."""
        seconds = self.deadline - asyncio.get_running_loop().time()
        if seconds <= 0:
            raise DeadlineExceededError("the request ran past --request-timeout")
        return seconds
