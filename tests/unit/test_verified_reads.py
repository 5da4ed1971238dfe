"""P's digests and D's comparison, between a real control service and a real transport."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import msgspec
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from connector.pd.control import LeaseDesk
from connector.pd.digests import HeldDigests, digest
from connector.pd.digests_ahead import ArenaDigests
from connector.pd.faults import NO_FAULTS, FaultInjector, FaultPoint, FaultScene
from connector.pd.geometry import describe_spec, geometry_of
from connector.pd.layout import blocks_announced
from connector.pd.lease import Lease, LeaseTable
from connector.pd.lease_words import LeaseWords
from connector.pd.peers import Peer
from connector.pd.pull_plan import PullPlan, plan_pull
from connector.pd.reading import STAGE_BYTES, PullReader, in_stages
from connector.transports.base import SpanPair
from connector.transports.shm import ShmTransport
from engine.arena import MARGIN_BYTES, ArenaMemory
from engine.errors import KVTransferParamsError, LateReadError, TransportError, VerificationError
from engine.kv_cache.plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, form_groups
from engine.metrics import NodeMetrics, TransferMetrics
from engine.rpc.control_client import ControlClient
from engine.rpc.control_service import ControlService
from engine.rpc.messages import DIGESTS_XXH3_64, BlockRange, Digests
from engine.rpc.server import start_server
from tests.cluster import until
from tests.faults import AtNth, flip
from tests.leases import LEASE_S, identity, lease_table

T = TypeVar("T")
MAMBA = MambaSpec("gdn", (3, 64), "float32", (2, 16, 16))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=4, dtype="float32")
PLAN = plan_arena(form_groups(((MAMBA,), (ATTENTION,))), 16, 1 << 18)
STATE, PAGES = PLAN.state_groups[0], 1 - PLAN.state_groups[0]


def by_group(state: T, pages: T) -> tuple[T, T]:
    return (state, pages) if STATE < PAGES else (pages, state)


def offsets_of(tables: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(PLAN.block_offset(group, block) for block in blocks)
        for group, blocks in enumerate(tables)
    )


REMOTE = offsets_of(by_group((2,), (9, 5, 6, 7)))
LOCAL: tuple[tuple[int, ...], ...] = by_group((0,), (60, 61, 62, 63))
WORDS = PLAN.arena_bytes
"""Where P's lease words begin."""
IDENTITY = identity(WORDS)


@dataclass(slots=True)
class Pair:
    """P's and D's arenas, and what connects them."""

    p: ArenaMemory
    d: ArenaMemory
    leases: LeaseTable
    desk: LeaseDesk
    control: ControlClient
    metrics: NodeMetrics
    transfers: TransferMetrics
    transport: ShmTransport
    now: list[float]

    @property
    def generation(self) -> int:
        """Of the one lease that P has granted."""
        (lease,) = self.leases.all_held()
        return lease.generation

    def plan(self, num_local_tokens: int = 0) -> PullPlan:
        return plan_pull(
            PLAN,
            blocks_announced(PLAN, geometry_of(PLAN), REMOTE, num_tokens=64),
            LOCAL,
            num_tokens=64,
            num_local_tokens=num_local_tokens,
        )

    async def read(
        self,
        plan: PullPlan,
        *,
        capabilities: tuple[str, ...] = (DIGESTS_XXH3_64,),
        generation: int | None = None,
        verify: bool = True,
        faults: FaultInjector = NO_FAULTS,
        stage_bytes: int = STAGE_BYTES,
    ) -> None:
        peer = Peer("p", self.control, 5.0, geometry_of(PLAN), 30.0, WORDS, capabilities)
        reader = PullReader(
            self.transport,
            self.d,
            verify=verify,
            metrics=self.transfers,
            faults=faults,
            stage_bytes=stage_bytes,
        )
        with closing(reader):
            await asyncio.to_thread(
                reader.read,
                peer,
                plan,
                request_id="r",
                generation=self.generation if generation is None else generation,
                timeout_s=5.0,
            )

    def has_read(self, plan: PullPlan) -> bool:
        theirs, ours = self.p.host_bytes(), self.d.host_bytes()
        return all(
            theirs[span.remote : span.remote + span.length]
            == ours[span.local : span.local + span.length]
            for span in plan.spans
        )

    def counted(self, name: str, **labels: str) -> float | None:
        every = {"model_name": "m", "engine": "d", **labels}
        return self.metrics.registry.get_sample_value(f"tandem:{name}_total", every)


@dataclass(slots=True)
class ChangedDigests:
    """What P found, changed before it answers."""

    found: ArenaDigests
    change: Callable[[Digests], Digests]

    def begin(self, lease: Lease) -> None:
        self.found.begin(lease)

    def of(self, lease: Lease, ranges: Sequence[BlockRange]) -> Digests:
        return self.change(self.found.of(lease, ranges))


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
async def pair(digest: Callable[[Digests], Digests] = lambda found: found) -> AsyncIterator[Pair]:
    """`digest` may change what P answers."""
    p, d = (ArenaMemory(PLAN.arena_bytes + MARGIN_BYTES) for _ in range(2))
    p.tensor[:WORDS].random_(256)
    now = [0.0]
    leases = LeaseTable(LEASE_S, lambda: now[0], LeaseWords(p))
    leases.grant("r", REMOTE, 64)
    digests = ChangedDigests(ArenaDigests(PLAN, p), digest)
    desk = LeaseDesk(IDENTITY, leases, digests=digests, wake=lambda: None)
    server = await start_server([ControlService(desk)], "127.0.0.1", 0, token=None)
    control = ControlClient(f"127.0.0.1:{server.port}", token=None, caller_engine_id="d")
    theirs, ours = ShmTransport("p"), ShmTransport("d")
    ours.register(d)
    ours.connect("p", theirs.register(p))
    metrics = NodeMetrics("m", "d")
    yield Pair(p, d, leases, desk, control, metrics, TransferMetrics(metrics), ours, now)
    control.close()
    await server.close()
    for item in (digests.found, ours, theirs, d, p):
        item.close()


async def test_only_what_was_pulled_is_compared() -> None:
    async with pair() as nodes:
        plan = nodes.plan(num_local_tokens=32)
        await nodes.read(plan)
        assert nodes.has_read(plan)
        verified = plan.state_bytes + plan.attention_bytes
        assert verified == PLAN.block_bytes(STATE) + 2 * PLAN.block_bytes(PAGES)
        assert nodes.counted("kv_verified_bytes") == verified
        assert nodes.counted("kv_verification_retries") == 0


@pytest.mark.parametrize("group", [STATE, PAGES])
async def test_a_digest_that_never_fits_ends_the_pull(group: int) -> None:
    def change(found: Digests) -> Digests:
        changed = (*found[group][:-1], found[group][-1] ^ 1)
        return tuple(changed if g == group else old for g, old in enumerate(found))

    async with pair(change) as nodes:
        with pytest.raises(VerificationError, match="1 of 5 blocks of r differ"):
            await nodes.read(nodes.plan())
        kind, other = ("state", "attention") if group == STATE else ("attention", "state")
        assert nodes.counted("kv_verification_failures", kind=kind) == 2
        assert nodes.counted("kv_verification_failures", kind=other) == 0
        assert nodes.counted("kv_verification_retries") == 1


async def test_too_few_digests_are_refused() -> None:
    async with pair(lambda found: tuple(group[1:] for group in found)) as nodes:
        with pytest.raises(TransportError, match="the peer sent"):
            await nodes.read(nodes.plan())


async def test_a_lease_of_another_generation_has_no_digests() -> None:
    async with pair() as nodes:
        old = nodes.generation
        nodes.leases.grant("r", REMOTE, 64)
        assert nodes.generation > old
        with pytest.raises(LateReadError, match="no more when the read ended"):
            await nodes.read(nodes.plan(), generation=old)
        await nodes.read(nodes.plan())


@pytest.mark.parametrize("stage_bytes", [100, 1 << 20])
@pytest.mark.parametrize("verify", [True, False])
async def test_a_read_that_outlives_its_lease_is_late(verify: bool, stage_bytes: int) -> None:
    """P has answered with digests, and the bytes are what they were."""
    async with pair() as nodes:

        def end(scene: FaultScene) -> None:
            assert nodes.leases.release("r", nodes.generation)

        ending = AtNth(FaultPoint.BEFORE_CONFIRM, end)
        with pytest.raises(LateReadError, match="no more when the read ended"):
            await nodes.read(nodes.plan(), verify=verify, faults=ending, stage_bytes=stage_bytes)
        assert nodes.has_read(nodes.plan())


@pytest.mark.parametrize("stage_bytes", [1, 100, 4096, 1 << 20])
async def test_damage_is_found_in_whatever_stage_it_comes(stage_bytes: int) -> None:
    async with pair() as nodes:
        plan = nodes.plan()
        state, last = plan.groups[STATE].blocks[0][0], plan.groups[PAGES].blocks[-1][-1]
        for place in (state.local, last.local, last.local + last.length - 1):
            flipping = DamagedOnce(nodes.d, place)
            await nodes.read(plan, faults=flipping, stage_bytes=stage_bytes)
            assert flipping.is_done
            assert nodes.has_read(plan)
        assert nodes.counted("kv_verification_retries") == 3
        assert nodes.counted("kv_verification_failures", kind="state") == 1
        assert nodes.counted("kv_verification_failures", kind="attention") == 2


async def test_a_lease_that_ends_while_p_hashes_has_no_digests() -> None:
    def end(found: Digests) -> Digests:
        nodes.leases.release("r")
        return found

    async with pair(end) as nodes:
        ranges = [group.asked for group in nodes.plan().groups]
        with pytest.raises(KVTransferParamsError, match="not held any more"):
            nodes.desk.digests("p", "r", nodes.generation, ranges=ranges)


async def test_a_lease_that_ran_out_has_no_digests() -> None:
    async with pair() as nodes:
        nodes.now[0] = LEASE_S
        with pytest.raises(LateReadError, match="not held any more"):
            await nodes.read(nodes.plan())


async def test_a_peer_without_digests_is_read_and_the_pull_counted_as_unverified() -> None:
    async with pair() as nodes:
        plan = nodes.plan()
        await nodes.read(plan, capabilities=())
        assert nodes.has_read(plan)
        assert nodes.counted("kv_unverified_transfers") == 1
        assert nodes.counted("kv_verified_bytes") == 0


async def test_digests_are_those_of_the_tokens_asked_for() -> None:
    async with pair() as nodes:
        asked = [group.asked for group in nodes.plan().groups]
        whole = nodes.desk.digests("p", "r", nodes.generation, ranges=asked)
        later = [group.asked for group in nodes.plan(num_local_tokens=48).groups]
        part = nodes.desk.digests("p", "r", nodes.generation, ranges=later)
        assert part[STATE] == whole[STATE]
        assert part[PAGES] == whole[PAGES][3:]


async def test_what_is_hashed_ahead_is_not_hashed_again() -> None:
    """All of it, once there was time; a byte that changed afterwards is not seen."""
    async with pair() as nodes:
        ranges = [group.asked for group in nodes.plan().groups]
        before = nodes.desk.digests("p", "r", nodes.generation, ranges=ranges)
        nodes.desk.claim("p", "r", "d")
        lease = nodes.leases.claim("r")
        assert lease is not None
        digests = lease.digests
        await until(lambda: digests is not None and digests.num_known == 5)
        nodes.p.host_bytes()[REMOTE[PAGES][0]] ^= 1
        assert nodes.desk.digests("p", "r", nodes.generation, ranges=ranges) == before
        later = [msgspec.structs.replace(asked, block_size=32) for asked in ranges]
        assert nodes.desk.digests("p", "r", nodes.generation, ranges=later)[STATE] == before[STATE]


def test_nothing_is_hashed_ahead_of_an_answer_or_behind_the_end_of_a_lease() -> None:
    held = blocks_announced(PLAN, geometry_of(PLAN), REMOTE, num_tokens=64)
    asked = HeldDigests(held, memoryview(bytes(PLAN.arena_bytes)))
    asked.of([HELD])
    leases = lease_table(LEASE_S, lambda: 0.0)
    lease = leases.grant("r", REMOTE, 64)
    lease.digests = ended = HeldDigests(held, memoryview(bytes(PLAN.arena_bytes)))
    leases.release("r")
    for digests, known in ((asked, 4), (ended, 0)):
        digests.hash_ahead()
        assert digests.num_known == known


HELD = BlockRange(kept=describe_spec(ATTENTION), layers=(1,), block_size=16, end=64)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end": 65}, "not all here"),
        ({"start": 65, "end": 64}, "not all here"),
        ({"block_size": 0}, "no block size"),
        ({"layers": ()}, "no layer"),
        ({"layers": (0,)}, "layer 0 keeps no"),
        ({"kept": "attention of another kind"}, "another kind"),
    ],
)
async def test_ranges_that_are_not_held_are_refused(
    change: dict[str, object], message: str
) -> None:
    async with pair() as nodes:
        asked = msgspec.structs.replace(HELD, **change)
        with pytest.raises(TransportError, match=message):
            await asyncio.to_thread(
                nodes.control.digests, "p", "r", nodes.generation, ranges=[asked], timeout_s=5.0
            )


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 50))
def test_stages_are_all_blocks_in_order_and_end_where_they_are_full(
    lengths: list[int], limit: int
) -> None:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    blocks = [tuple(_halves(*block)) for block in zip(starts, lengths, strict=True)]
    stages = list(in_stages(blocks, limit))
    assert [block for stage in stages for block in stage.blocks] == blocks
    begin = 0
    for stage in stages:
        *before, last = [sum(piece.length for piece in block) for block in stage.blocks]
        assert stage.end == begin + sum(before) + last
        assert sum(before) < limit
        assert stage is stages[-1] or sum(before) + last >= limit
        begin = stage.end


def _halves(start: int, length: int) -> Iterator[SpanPair]:
    """A block in two pieces, or in one where there is but one byte."""
    half = length // 2
    if half:
        yield SpanPair(start + 7, start, half)
    yield SpanPair(start + half + 7, start + half, length - half)


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=4))
def test_a_digest_is_that_of_the_bytes_in_however_many_pieces(
    content: bytes, cuts: list[int]
) -> None:
    """As any other xxh3-64 finds it."""
    places = sorted({0, len(content), *(cut for cut in cuts if cut < len(content))})
    pieces = [(start, end - start) for start, end in pairwise(places)]
    assert digest(memoryview(content), pieces) == xxhash.xxh3_64_intdigest(content)
