"""P's digests and D's comparison, between a real control service and a real transport."""

from collections.abc import Iterator, Sequence
from threading import Event

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connector.pd.decode.pull_reader import in_stages
from connector.pd.layout import blocks_announced
from connector.pd.prefill.held_digests import HeldDigests
from connector.pd.wire.geometry import describe_spec, geometry_of
from connector.pd.wire.messages import BlockRange, Digests, DigestsQuestion
from connector.transports.base import SpanPair
from engine.digests import Spans
from engine.errors import (
    KVTransferParamsError,
    LateReadError,
    OtherPromptError,
    TransportError,
    VerificationError,
)
from tests.support.cache.bare_pulls import (
    ATTENTION,
    PAGES,
    PLAN,
    REMOTE,
    STATE,
    DamagedOnce,
    Pair,
    pair,
)
from tests.support.cache.leases import HOLDING, LEASE_S, lease_table
from tests.support.faults.fault_points import FaultPoint, FaultScene
from tests.support.faults.faults import AtNth


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
        nodes.leases.grant("r", REMOTE, 64, holding=HOLDING)
        assert nodes.generation > old
        with pytest.raises(LateReadError, match="no longer held r when the read ended"):
            await nodes.read(nodes.plan(), generation=old)
        await nodes.read(nodes.plan())


def digests_of(nodes: Pair, ranges: list[BlockRange], left: Event | None = None) -> Digests:
    """P's own, without a connection."""
    left = left or Event()
    return nodes.handler.digests("p", "r", nodes.generation, ranges=ranges, left=left)


@pytest.mark.parametrize("verify", [True, False])
async def test_a_lease_that_holds_something_else_is_not_believed(verify: bool) -> None:
    async with pair() as nodes:
        with pytest.raises(OtherPromptError, match="holds another prompt as r, or in other blocks"):
            await nodes.read(nodes.plan(), holding=HOLDING[::-1], verify=verify)
        await nodes.read(nodes.plan(), verify=verify)


@pytest.mark.parametrize("stage_bytes", [100, 1 << 20])
@pytest.mark.parametrize("verify", [True, False])
async def test_a_read_that_outlives_its_lease_is_late(verify: bool, stage_bytes: int) -> None:
    """P has answered with digests, and the bytes are what they were."""
    async with pair() as nodes:

        def end(scene: FaultScene) -> None:
            assert nodes.leases.release("r", nodes.generation)

        ending = AtNth(FaultPoint.BEFORE_CONFIRM, end)
        with pytest.raises(LateReadError, match="no longer held r when the read ended"):
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
        with pytest.raises(KVTransferParamsError, match="not held here"):
            digests_of(nodes, ranges)


async def test_a_lease_that_ran_out_has_no_digests() -> None:
    async with pair() as nodes:
        nodes.now[0] = LEASE_S
        with pytest.raises(LateReadError, match="not held here"):
            await nodes.read(nodes.plan())


async def test_digests_are_those_of_the_tokens_asked_for() -> None:
    async with pair() as nodes:
        asked = [group.asked for group in nodes.plan().groups]
        whole = digests_of(nodes, asked)
        later = [group.asked for group in nodes.plan(num_local_tokens=48).groups]
        part = digests_of(nodes, later)
        assert part[STATE] == whole[STATE]
        assert part[PAGES] == whole[PAGES][3:]


async def test_a_question_is_bounded_by_what_is_held_and_by_whoever_waits_for_the_answer() -> None:
    async with pair() as nodes:
        ranges = [group.asked for group in nodes.plan().groups]
        with pytest.raises(TransportError, match=r"layers \[0, 1\] are asked for more than once"):
            digests_of(nodes, ranges * 2)
        endless = [msgspec.structs.replace(asked, end=2**32 - 1) for asked in ranges]
        with pytest.raises(TransportError, match="blocks are asked for; of the 5 that are held"):
            digests_of(nodes, endless)
        left = Event()
        left.set()
        with pytest.raises(TransportError, match="has left"):
            digests_of(nodes, ranges, left)
        assert len(digests_of(nodes, ranges)[PAGES]) == 4


async def test_what_is_hashed_ahead_is_not_hashed_again() -> None:
    """All of it, once there was time; a byte that changed afterwards is not seen."""
    async with pair() as nodes:
        ranges = [group.asked for group in nodes.plan().groups]
        before = digests_of(nodes, ranges)
        await nodes.hash_ahead()
        nodes.p.host_bytes()[PLAN.block_offset(PAGES, REMOTE[PAGES][0])] ^= 1
        assert digests_of(nodes, ranges) == before
        later = [msgspec.structs.replace(asked, block_size=32) for asked in ranges]
        assert digests_of(nodes, later)[STATE] == before[STATE]


def test_nothing_is_hashed_ahead_of_an_answer_or_behind_the_end_of_a_lease() -> None:
    held = blocks_announced(PLAN, geometry_of(PLAN), REMOTE, num_tokens=64)

    def found(blocks: Sequence[Spans]) -> list[int]:
        return [1] * len(blocks)

    leases = lease_table(LEASE_S, lambda: 0.0)
    lease = leases.grant("r", REMOTE, 64, holding=HOLDING)
    asked = HeldDigests(held, found, lease.record.put)
    asked.of([HELD], Event())
    lease.digests = ended = HeldDigests(held, found, lease.record.put)
    leases.release("r")
    for digests, known in ((asked, 4), (ended, 0)):
        digests.hash_ahead()
        assert len(digests._known) == known


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
        question = DigestsQuestion(
            engine_id="p", request_id="r", generation=nodes.generation, ranges=(asked,)
        )
        with pytest.raises(TransportError, match=message):
            await nodes.control.digests(question)


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
