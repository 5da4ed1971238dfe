"""Faults drawn from a seed: at any point of a hand-over, of any kind, several at once.

A plan depends on its run's name alone, so that one run can be repeated without the others.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

from connector.pd.prefill.lease_table import Lease
from connector.pd.wire.messages import ANY_GENERATION
from engine import errors
from engine.errors import TandemError
from serving.node.server import NodeServer
from tests.support.faults.fault_points import FaultInjector, FaultPoint, FaultScene
from tests.support.faults.faults import content, raising, random_damage
from tests.support.nodes.accounts import arena_of, leases_of

KINDS: dict[str, type[TandemError]] = {
    kind.__name__: kind
    for kind in (
        TandemError,
        errors.UnavailableError,
        errors.DeadlineExceededError,
        errors.OverloadedError,
        errors.KVTransferParamsError,
        errors.KVLoadError,
        errors.TransportError,
        errors.TransferTimeoutError,
        errors.LateReadError,
        errors.VerificationError,
    )
}
DELAY, DAMAGE, LEASE_ENDS, BLOCKS_REUSED = "delay", "damage", "lease ends", "blocks reused"
READS = (FaultPoint.BEFORE_READ, FaultPoint.AFTER_READ)
MAX_DELAY_S = 0.004
MAX_NTH = 4


@dataclass(slots=True, frozen=True)
class Step:
    """`act` at the `nth` pass of `point`."""

    point: FaultPoint
    act: str
    nth: int


@dataclass(slots=True)
class Plan:
    """Faults that are planned for one hand-over; `fired`: those that happened, in order."""

    rng: Random
    steps: tuple[Step, ...]
    request_id: str = ""
    passed: Counter[FaultPoint] = field(default_factory=Counter)
    fired: list[Step] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def due(self, point: FaultPoint) -> list[Step]:
        """The steps of this pass."""
        with self.lock:
            self.passed[point] += 1
            now = point, self.passed[point]
            return [step for step in self.steps if (step.point, step.nth) == now]

    @property
    def names(self) -> list[str]:
        """Names of the acts that were done, whatever the point."""
        return [step.act for step in self.fired]

    @property
    def must_fail(self) -> bool:
        """The lease ended before D had read its record, or before P had answered with digests."""
        too_late = (FaultPoint.BEFORE_RELEASE, FaultPoint.AFTER_RELEASE)
        return any(
            step.act in (LEASE_ENDS, BLOCKS_REUSED) and step.point not in too_late
            for step in self.fired
        )

    @property
    def must_succeed(self) -> bool:
        """Nothing was done that a second read would not mend."""
        return set(self.names) <= {DELAY, DAMAGE} and self.names.count(DAMAGE) < 2


def draw_plan(name: str, *, damage: bool) -> Plan:
    """The plan of the run called `name`; about one in six is empty."""
    rng = Random(name)
    count = rng.choice((0, 1, 1, 1, 2, 3))
    return Plan(rng, tuple(_draw_step(rng, damage) for _ in range(count)))


def _draw_step(rng: Random, damage: bool) -> Step:
    point = rng.choice(tuple(FaultPoint))
    nth = rng.randint(1, MAX_NTH) if point in READS else 1
    acts = [DELAY, LEASE_ENDS, BLOCKS_REUSED, rng.choice(tuple(KINDS)), rng.choice(tuple(KINDS))]
    if damage and point is FaultPoint.AFTER_READ:
        acts += [DAMAGE] * len(acts)
    return Step(point, rng.choice(acts), nth)


class Plans:
    """The plans of all hand-overs of one prefill node, and what was done where by all of them."""

    def __init__(self) -> None:
        self.prefill_node: NodeServer | None = None
        self.fired: Counter[tuple[FaultPoint, str]] = Counter()
        self._by_name: dict[str, Plan] = {}
        self._lock = threading.Lock()

    def add(self, plan: Plan, request_id: str, reader: str) -> None:
        """From now on `plan` is that of P's prefill `request_id` and of the D that reads it."""
        plan.request_id = request_id
        self._by_name[request_id] = self._by_name[reader] = plan

    def get(self, name: str) -> Plan | None:
        """The plan of a prefill, or the newest one of a reader, if it has one."""
        return self._by_name.get(name)

    def record(self, plan: Plan, step: Step) -> None:
        """`step` is going to be done."""
        with self._lock:
            plan.fired.append(step)
            self.fired[step.point, step.act] += 1

    def end_lease(self, plan: Plan, *, reuse: bool) -> None:
        """Other bytes first: as long as the lease lives, P gives these blocks to nobody else."""
        assert self.prefill_node is not None
        leases = leases_of(self.prefill_node)
        lease = leases.held(plan.request_id, ANY_GENERATION)
        if reuse and lease is not None:
            _overwrite(self.prefill_node, lease, plan.rng)
        leases.release(plan.request_id)


class PlannedFaults(FaultInjector):
    """Carries plans out on P, or on a D, which has one hand-over at a time; `reader` is its name.

    On P a handshake has a reader, and all else a prefill.
    """

    def __init__(self, plans: Plans) -> None:
        self.plans = plans
        self.reader = ""

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        plan = self.plans.get(scene.request_id or scene.reader or self.reader)
        if plan is not None:
            for step in plan.due(point):
                self.plans.record(plan, step)
                self._do(plan, step, scene)

    def _do(self, plan: Plan, step: Step, scene: FaultScene) -> None:
        if step.act == DELAY:
            time.sleep(plan.rng.uniform(0, MAX_DELAY_S))
        elif step.act == DAMAGE:
            _damage(plan.rng, scene)
        elif step.act in (LEASE_ENDS, BLOCKS_REUSED):
            self.plans.end_lease(plan, reuse=step.act == BLOCKS_REUSED)
        else:
            raising(KINDS[step.act])(scene)


def _damage(rng: Random, scene: FaultScene) -> None:
    before = content(scene)
    while content(scene) == before:
        random_damage(rng)(scene.memory, scene.spans)


def _overwrite(node: NodeServer, lease: Lease, rng: Random) -> None:
    layout, memory = node.engine.core.scheduler.cache.plan, arena_of(node).host_bytes()
    for group, blocks in enumerate(lease.block_ids):
        length = layout.block_bytes(group)
        for offset in (layout.block_offset(group, block) for block in blocks):
            memory[offset : offset + length] = rng.randbytes(length)
