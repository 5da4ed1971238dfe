"""Faults of a hand-over, for real nodes: damaged bytes, and refusals of P."""

import threading
from collections.abc import Callable, Sequence
from random import Random

from engine.errors import TandemError
from serving.node.server import NodeServer
from tests.support.faults.fault_points import NO_FAULTS, FaultInjector, FaultPoint, FaultScene
from tests.support.nodes.cluster import sample, sample_or_none

Span = tuple[int, int, int]
Damage = Callable[[memoryview, Sequence[Span]], None]


class DamagedReads(FaultInjector):
    """Does `damage` to what the next `times` reads bring; `hits` counts reads that it changed."""

    def __init__(self, damage: Damage, times: int = 1) -> None:
        self.damage = damage
        self.times = times
        self.hits = 0

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        if point is FaultPoint.AFTER_READ and self.times:
            self.times -= 1
            before = content(scene)
            self.damage(scene.memory, scene.spans)
            self.hits += content(scene) != before


class LateBytes(FaultInjector):
    """The first read is said to have ended while the memory is still that of a new arena."""

    def __init__(self) -> None:
        self.hits = 0

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        if point is FaultPoint.AFTER_READ and self.hits == 0:
            for _, start, length in scene.spans:
                drop(scene.memory, start, length)
            self.hits += 1


class AtNth(FaultInjector):
    """Does `act` when `point` is passed for the `nth` time, and never again; counts `passed`."""

    def __init__(self, point: FaultPoint, act: Callable[[FaultScene], None], nth: int = 1) -> None:
        self._point = point
        self._act = act
        self._nth = nth
        self.passed = 0

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        if point is self._point:
            self.passed += 1
            if self.passed == self._nth:
                self._act(scene)


class HeldPull(FaultInjector):
    """A pull that stays at one point, at its `nth` pass, until `go`."""

    def __init__(self, point: FaultPoint, nth: int = 1) -> None:
        self._held = AtNth(point, self._hold, nth)
        self.reached = threading.Event()
        self.go = threading.Event()

    @property
    def passed(self) -> int:
        """How often the point was passed, the held pass included."""
        return self._held.passed

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        self._held.at(point, scene)

    def _hold(self, scene: FaultScene) -> None:
        self.reached.set()
        assert self.go.wait(20)


class Armed(FaultInjector):
    """Nothing, until a test puts something there."""

    def __init__(self) -> None:
        self.inner = NO_FAULTS

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        self.inner.at(point, scene)

    def nth(self, point: FaultPoint, act: Callable[[FaultScene], None], nth: int = 1) -> AtNth:
        """`act` at the `nth` pass from now on, which is told."""
        print(f"pass {nth} of {point.name}")
        planted = self.inner = AtNth(point, act, nth)
        return planted

    def hold(self, point: FaultPoint, nth: int = 1) -> HeldPull:
        """A hand-over stays at the `nth` pass from now on, which is told."""
        print(f"held at pass {nth} of {point.name}")
        planted = self.inner = HeldPull(point, nth)
        return planted


class Refusing(FaultInjector):
    """Fails at one point with a new error each time: a raised one keeps a node's frames alive."""

    def __init__(self, point: FaultPoint, kind: Callable[[str], TandemError]) -> None:
        self._point = point
        self._kind = kind

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        if point is self._point:
            raising(self._kind)(scene)


def raising(kind: Callable[[str], TandemError]) -> Callable[[FaultScene], None]:
    """An injector's action that fails with a new error each time."""

    def act(scene: FaultScene) -> None:
        raise kind("refused by the test")

    return act


def content(scene: FaultScene) -> list[bytes]:
    """The bytes under the spans."""
    return [bytes(scene.memory[start : start + length]) for _, start, length in scene.spans]


def flip(memory: memoryview, place: int) -> None:
    memory[place] ^= 0x10


def swap(memory: memoryview, one: int, other: int, *, length: int) -> None:
    kept = bytes(memory[one : one + length])
    memory[one : one + length] = memory[other : other + length]
    memory[other : other + length] = kept


def drop(memory: memoryview, start: int, length: int) -> None:
    memory[start : start + length] = bytes(length)


def random_damage(rng: Random) -> Damage:
    """A bit, a swap or a gap, somewhere in what was read."""

    def damage(memory: memoryview, spans: Sequence[Span]) -> None:
        one, other = place_in(rng, spans), place_in(rng, spans)
        room = min(one[1], other[1])
        length = rng.randint(1, room)
        match rng.randrange(3):
            case 0:
                memory[one[0]] ^= 1 << rng.randrange(8)
            case 1 if abs(one[0] - other[0]) >= length:
                swap(memory, one[0], other[0], length=length)
            case _:
                drop(memory, one[0], length)

    return damage


def place_in(rng: Random, spans: Sequence[Span]) -> tuple[int, int]:
    """A byte of the spans, and how many follow it in its span, itself included."""
    _, start, length = rng.choice(spans)
    skipped = rng.randrange(length)
    return start + skipped, length - skipped


def counted(node: NodeServer, name: str, **labels: str) -> float:
    """A counter of a node, as Prometheus would read it."""
    return sample_or_none(node, f"{name}_total", **labels) or 0.0


def recomputed(node: NodeServer) -> dict[str, float]:
    """Tokens that a node has computed again, by cause."""
    name = "vllm:prompt_tokens_recomputed_total"
    causes = {cause for cause in node.engine.core.scheduler.stats.recomputed_tokens}
    found = {cause: sample(node, name, cause=cause) for cause in causes}
    return {cause: number for cause, number in found.items() if number}
