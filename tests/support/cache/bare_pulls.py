"""P's arena, control service and leases, and D's reader: a pull without nodes."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

from connector.pd.decode.peer_registry import Peer
from connector.pd.decode.pull_plan import PullPlan, plan_pull
from connector.pd.decode.pull_reader import STAGE_BYTES, PullReader, Reading
from connector.pd.layout import SequenceBlocks, blocks_announced
from connector.pd.metrics import TransferMetrics
from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.control_service import ControlService
from connector.pd.prefill.held_digests import ArenaDigests, HeldDigests, PutDigest
from connector.pd.prefill.lease_records import LeaseRecords
from connector.pd.prefill.lease_table import Lease, LeaseTable
from connector.pd.wire.control_client import ControlClient
from connector.pd.wire.geometry import geometry_of
from connector.pd.wire.lease_record import REGION_BYTES
from connector.pd.wire.messages import BlockIds, BlockRange, Digests
from connector.transports.base import Transport
from connector.transports.shm import ShmTransport
from engine.arena import ArenaMemory
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, StatePart, form_groups
from serving.metrics import NodeMetrics
from serving.rpc.server import start_server
from tests.support.cache.leases import HOLDING, LEASE_S, identity
from tests.support.faults.fault_points import (
    NO_FAULTS,
    FaultInjector,
    FaultPoint,
    FaultScene,
    FaultyTransport,
)
from tests.support.faults.faults import flip

T = TypeVar("T")
MAMBA = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=4, dtype="float32")
PLAN = plan_arena(form_groups(((MAMBA,), (ATTENTION,))), 16, 1 << 18)
STATE, PAGES = PLAN.state_groups[0], 1 - PLAN.state_groups[0]


def by_group(state: T, pages: T) -> tuple[T, T]:
    return (state, pages) if STATE < PAGES else (pages, state)


REMOTE: BlockIds = by_group((2,), (9, 5, 6, 7))
LOCAL: BlockIds = by_group((0,), (60, 61, 62, 63))
IDENTITY = identity()


@dataclass(slots=True)
class Pair:
    """P's and D's arenas and lease records, and what connects them."""

    p: ArenaMemory
    d: ArenaMemory
    p_records: ArenaMemory
    d_records: ArenaMemory
    leases: LeaseTable
    handler: ControlHandler
    digests: "ChangedDigests"
    control: ControlClient
    metrics: NodeMetrics
    transfers: TransferMetrics
    transport: FaultyTransport
    now: list[float]

    @property
    def lease(self) -> Lease:
        """The lease that P has granted."""
        (lease,) = self.leases.all_held()
        return lease

    @property
    def generation(self) -> int:
        """The generation of that lease."""
        return self.lease.generation

    async def hash_ahead(self) -> None:
        """Returns when P has hashed all it holds."""
        assert self.lease.digests is not None
        await asyncio.to_thread(self.lease.digests.hash_ahead)

    def plan(self, num_local_tokens: int = 0) -> PullPlan:
        return plan_pull(
            PLAN,
            blocks_announced(PLAN, geometry_of(PLAN), REMOTE, num_tokens=64),
            LOCAL,
            num_tokens=64,
            ranges=[(0 if group == STATE else num_local_tokens, 64) for group in (0, 1)],
        )

    async def read(
        self,
        plan: PullPlan,
        *,
        generation: int | None = None,
        holding: bytes = HOLDING,
        verify: bool = True,
        faults: FaultInjector = NO_FAULTS,
        stage_bytes: int = STAGE_BYTES,
        timeout_s: float = 5.0,
    ) -> None:
        self.transport.faults = faults
        peer = Peer("p", "p", self.control, geometry_of(PLAN), 30.0)
        reader = PullReader(
            self.transport,
            self.d,
            self.d_records,
            verify=verify,
            metrics=self.transfers,
            stage_bytes=stage_bytes,
        )
        if generation is None:
            generation = self.generation
        reading = Reading(peer, "r", generation, holding, monotonic() + timeout_s)
        with closing(reader):
            await asyncio.to_thread(reader.read, reading, plan)

    def has_read(self, plan: PullPlan) -> bool:
        theirs, ours = self.p.host_bytes(), self.d.host_bytes()
        return all(
            theirs[span.remote : span.remote + span.length]
            == ours[span.local : span.local + span.length]
            for span in plan.spans
        )

    def counted(self, name: str, **labels: str) -> float | None:
        every = {"model_name": "m", "engine": "0", "role": "d", **labels}
        return self.metrics.registry.get_sample_value(f"tandem:{name}_total", every)


class ChangedDigests(ArenaDigests):
    """Changes the digests that P found before it answers; `num_asked` counts the questions.

    Hashes ahead when a test says so.
    """

    def __init__(self, arena: ArenaMemory, change: Callable[[Digests], Digests]) -> None:
        super().__init__(PLAN, arena.digests)
        self.digests = arena.digests
        self.change = change
        self.num_asked = 0

    def begin(self, block_ids: BlockIds, num_tokens: int, put: PutDigest) -> HeldDigests:
        held = blocks_announced(PLAN, geometry_of(PLAN), block_ids, num_tokens=num_tokens)
        return ChangedAnswers(held, self, put)


class ChangedAnswers(HeldDigests):
    """The changed digests of one lease."""

    def __init__(self, held: SequenceBlocks, owner: ChangedDigests, put: PutDigest) -> None:
        super().__init__(held, owner.digests, put)
        self.owner = owner

    def of(self, ranges: Sequence[BlockRange], left: threading.Event) -> Digests:
        self.owner.num_asked += 1
        return self.owner.change(super().of(ranges, left))


@dataclass(slots=True)
class DamagedOnce(FaultInjector):
    """Flips a byte when a read has brought it, the first time."""

    arena: ArenaMemory
    place: int
    is_done: bool = False

    def at(self, point: FaultPoint, scene: FaultScene) -> None:
        came = any(start <= self.place < start + length for _, start, length in scene.spans)
        if point is FaultPoint.AFTER_READ and came and not self.is_done:
            self.is_done = True
            flip(self.arena.host_bytes(), self.place)


@asynccontextmanager
async def pair(
    digest: Callable[[Digests], Digests] = lambda found: found,
    *,
    make_arena: Callable[[int], ArenaMemory] = ArenaMemory,
    make_transport: Callable[[str], Transport] = ShmTransport,
) -> AsyncIterator[Pair]:
    """`digest` may change what P answers."""
    p, d = (make_arena(PLAN.arena_bytes) for _ in range(2))
    p_records, d_records = (ArenaMemory(REGION_BYTES) for _ in range(2))
    p.tensor.random_(256)
    now = [0.0]
    digests = ChangedDigests(p, digest)
    records = LeaseRecords(p_records.host_bytes().cast("Q"))
    leases = LeaseTable(LEASE_S, lambda: now[0], records, digests=digests)
    leases.grant("r", REMOTE, 64, holding=HOLDING)
    handler = ControlHandler(IDENTITY.engine_id, lambda *_: IDENTITY, leases, wake=lambda: None)
    server = await start_server([ControlService(handler)], "127.0.0.1", 0, token=None)
    control = ControlClient(
        f"127.0.0.1:{server.port}", token=None, caller_engine_id="d", timeout_s=5.0
    )
    theirs, ours = make_transport("p"), FaultyTransport(make_transport("d"), NO_FAULTS)
    ours.register(d, d_records)
    theirs.register(p, p_records)
    ours.connect("p", theirs.address)
    metrics = NodeMetrics("m", "d")
    yield Pair(
        p,
        d,
        p_records,
        d_records,
        leases,
        handler,
        digests,
        control,
        metrics,
        TransferMetrics(metrics),
        ours,
        now,
    )
    await control.close()
    await server.close()
    for item in (digests, ours, theirs, d, p, d_records, p_records):
        item.close()
