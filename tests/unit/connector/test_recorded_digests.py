"""Digests that D reads out of P's memory, and when it asks P instead."""

import threading

import pytest

from connector.pd.decode import pull_reader
from connector.pd.wire.lease_record import HEADER_WORDS, start_of
from connector.pd.wire.messages import Digests
from engine.errors import LateReadError, TransportError, VerificationError
from tests.support.cache.bare_pulls import PAGES, PLAN, STATE, DamagedOnce, Pair, pair
from tests.support.faults.fault_points import FaultPoint, FaultScene
from tests.support.faults.faults import AtNth
from tests.support.nodes.cluster import until

NUM_PAGES = 4
NUM_BLOCKS = NUM_PAGES + 1


def word(nodes: Pair, number: int) -> memoryview:
    """One word of P's record."""
    start = start_of(nodes.generation) + number
    return nodes.p_records.host_bytes().cast("Q")[start : start + 1]


def digest_of(nodes: Pair, block: int) -> memoryview:
    """In P's record: of the pages in their order, then of the state."""
    return word(nodes, HEADER_WORDS + block)


@pytest.mark.parametrize("num_local_tokens", [0, 16, 48, 64])
async def test_what_p_has_hashed_is_compared_without_asking_it(num_local_tokens: int) -> None:
    async with pair() as nodes:
        await nodes.hash_ahead()
        plan = nodes.plan(num_local_tokens)
        await nodes.read(plan)
        assert nodes.has_read(plan)
        assert nodes.digests.num_asked == 0
        verified = plan.state_bytes + plan.attention_bytes
        num_read = NUM_PAGES - num_local_tokens // 16
        assert verified == PLAN.block_bytes(STATE) + num_read * PLAN.block_bytes(PAGES)
        assert nodes.counted("kv_verified_bytes") == verified
        assert nodes.counted("kv_verification_retries") == 0


async def test_nobody_waits_for_p_once_a_read_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pull_reader, "MAX_DIGESTS", 0)  # so D asks while it reads
    is_asked, go, has_answered = threading.Event(), threading.Event(), threading.Event()

    def think(found: Digests) -> Digests:
        is_asked.set()
        go.wait(10)
        has_answered.set()
        return found

    def fail(scene: FaultScene) -> None:
        assert is_asked.wait(10)
        raise TransportError("refused by the test")

    async with pair(think) as nodes:
        failing = AtNth(FaultPoint.BEFORE_CONFIRM, fail)
        with pytest.raises(TransportError, match="refused by the test"):
            await nodes.read(nodes.plan(), faults=failing, timeout_s=30.0)
        assert not has_answered.is_set()
        go.set()
        await until(has_answered.is_set)


@pytest.mark.parametrize("group", [STATE, PAGES])
@pytest.mark.parametrize("num_local_tokens", [0, 32])
async def test_damage_is_found_and_read_again(group: int, num_local_tokens: int) -> None:
    async with pair() as nodes:
        await nodes.hash_ahead()
        plan = nodes.plan(num_local_tokens)
        flipping = DamagedOnce(nodes.d, plan.groups[group].blocks[-1][0].local)
        await nodes.read(plan, faults=flipping)
        assert flipping.is_done
        assert nodes.has_read(plan)
        assert nodes.digests.num_asked == 1
        assert nodes.counted("kv_verification_retries") == 1
        kind = "state" if group == STATE else "attention"
        assert nodes.counted("kv_verification_failures", kind=kind) == 1


@pytest.mark.parametrize("group", [STATE, PAGES])
async def test_bytes_that_changed_after_p_hashed_them_are_not_believed(group: int) -> None:
    async with pair() as nodes:
        await nodes.hash_ahead()
        plan = nodes.plan()
        nodes.p.host_bytes()[plan.groups[group].blocks[0][0].remote] ^= 1
        with pytest.raises(VerificationError, match="1 of 5 blocks of r differ"):
            await nodes.read(plan)


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
async def test_each_block_has_its_own_digest(block: int) -> None:
    """One that is damaged in P's record costs a second read, and P's own word for it."""
    async with pair() as nodes:
        await nodes.hash_ahead()
        digest_of(nodes, block)[0] ^= 1
        plan = nodes.plan(num_local_tokens=32)
        await nodes.read(plan)
        assert nodes.has_read(plan)
        is_read = block >= 2
        assert nodes.counted("kv_verification_retries") == nodes.digests.num_asked == is_read


@pytest.mark.parametrize(("block", "num_asked"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 1)])
async def test_p_is_asked_for_what_it_has_not_hashed_yet(block: int, num_asked: int) -> None:
    async with pair() as nodes:
        await nodes.hash_ahead()
        digest_of(nodes, block)[0] = 0
        plan = nodes.plan(num_local_tokens=32)
        await nodes.read(plan)
        assert nodes.has_read(plan)
        assert nodes.digests.num_asked == num_asked
        assert nodes.counted("kv_verification_retries") == 0


async def test_p_is_asked_when_nothing_is_hashed() -> None:
    async with pair() as nodes:
        await nodes.read(nodes.plan())
        assert nodes.digests.num_asked == 1
        assert nodes.counted("kv_verification_retries") == 0


@pytest.mark.parametrize("num_digests", [0, NUM_BLOCKS - 1, NUM_BLOCKS + 1])
async def test_p_is_asked_when_its_record_is_of_other_blocks(num_digests: int) -> None:
    async with pair() as nodes:
        await nodes.hash_ahead()
        word(nodes, 1)[0] = num_digests
        digest_of(nodes, 0)[0] ^= 1
        await nodes.read(nodes.plan())
        assert nodes.digests.num_asked == 1
        assert nodes.counted("kv_verification_retries") == 0


async def test_p_is_asked_when_there_is_no_room_for_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pull_reader, "MAX_DIGESTS", NUM_BLOCKS - 1)
    async with pair() as nodes:
        await nodes.hash_ahead()
        digest_of(nodes, 0)[0] ^= 1
        await nodes.read(nodes.plan())
        assert nodes.digests.num_asked == 1
        assert nodes.counted("kv_verification_retries") == 0


async def test_the_record_of_another_generation_vouches_for_nothing() -> None:
    async with pair() as nodes:
        await nodes.hash_ahead()
        plan, generation = nodes.plan(), nodes.generation
        word(nodes, 0)[0] += 1
        with pytest.raises(LateReadError, match="no longer held r when the read ended"):
            await nodes.read(plan, generation=generation)
