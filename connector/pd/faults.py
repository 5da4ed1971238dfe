"""Named points of a hand-over where a test may break something on purpose.

Product code calls `FaultInjector.at` there. Nodes run with `NoFaults`; only who builds a connector
by hand can give another one. Knows neither requests nor transports.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final


class FaultPoint(Enum):
    """The points of a fault: on D from handshake to confirmation, on P around its answers.

    A pull passes BEFORE_READ once and AFTER_READ with every stage. AFTER_RELEASE: the lease has
    ended, nobody knows yet.
    """

    BEFORE_HANDSHAKE = auto()
    BEFORE_READ = auto()
    AFTER_READ = auto()
    BEFORE_CONFIRM = auto()
    BEFORE_DIGESTS = auto()
    BEFORE_RELEASE = auto()
    AFTER_RELEASE = auto()


@dataclass(slots=True, frozen=True)
class FaultScene:
    """The things in reach: P's name of the prefill, the spans of one read, D's arena.

    A span is (offset in P's arena, offset in `memory`, length). Spans and memory come with reads,
    and a name with all but handshakes.
    """

    request_id: str = ""
    spans: Sequence[tuple[int, int, int]] = ()
    memory: memoryview = field(default_factory=lambda: memoryview(b""))


class FaultInjector(ABC):
    """One fault, or a plan of many."""

    @abstractmethod
    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        """May wait, write into `scene.memory` or raise a TandemError; on the thread that works."""


class NoFaults(FaultInjector):
    """The injector of every real node: none."""

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        """Nothing happens."""


NO_FAULTS: Final = NoFaults()
