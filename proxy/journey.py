"""The state of one request on its way through the cluster: where it is, and what failed it."""

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from engine.errors import DeadlineExceededError, NodeLostError, TandemError
from engine.types import GenerateOutput, GenerateRequest, KVTransferParams
from proxy.cluster.node import Node
from proxy.legs import Leg


@dataclass(slots=True, frozen=True)
class Prefilled:
    """What P made of a request. Without `params` the outputs are the whole answer."""

    node: Node
    outputs: tuple[GenerateOutput, ...]
    params: KVTransferParams | None
    num_cached_tokens: int


@dataclass(slots=True)
class Journey:
    """`deadline` is in event-loop time; `failed` names the nodes that must not be tried again.

    `num_lost` counts the nodes that went away while they had the request. `use_prefill` is false
    once D must compute the prompt itself. `whole_answer` is what P made of a request that ended
    with its first token; else `leg` is D's, and `current` ends it.
    """

    request: GenerateRequest
    deadline: float
    failed: set[str] = field(default_factory=set)
    num_attempts: int = 0
    num_lost: int = 0
    num_tokens: int = 0
    use_prefill: bool = True
    prefilled: Prefilled | None = None
    whole_answer: deque[GenerateOutput] = field(default_factory=deque)
    leg: Leg | None = None
    current: AsyncExitStack = field(default_factory=AsyncExitStack)

    def remaining_s(self) -> float:
        """Raises `DeadlineExceededError` when nothing remains."""
        seconds = self.deadline - asyncio.get_running_loop().time()
        if seconds <= 0:
            raise DeadlineExceededError("the request ran past --request-timeout")
        return seconds

    def blame(self, node: Node, error: TandemError) -> None:
        """`node` failed the request and must not get it again."""
        self.failed.add(node.name)
        self.num_lost += isinstance(error, NodeLostError)
