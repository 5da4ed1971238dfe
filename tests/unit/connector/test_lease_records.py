"""Records of leases: there as long as a lease lives, gone before its blocks can be used again."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.pd.decode.pull_reader import RecordPlaces
from connector.pd.prefill.lease_records import FreeRuns, LeaseRecord, LeaseRecords
from connector.pd.prefill.lease_table import LeaseTable
from connector.pd.wire.lease_record import (
    HEADER_WORDS,
    MAX_DIGESTS,
    NUM_PLACES,
    NUM_WORDS,
    REGION_BYTES,
    start_of,
)
from tests.support.cache.leases import HOLDING, LEASE_S, NO_DIGESTS, num_free

NAMES = st.sampled_from("abcdef")
LARGEST = 2**64 - 1


@pytest.fixture
def region() -> "memoryview[int]":
    return memoryview(bytearray(REGION_BYTES)).cast("Q")


def words_at(region: "memoryview[int]", generation: int, num_words: int) -> list[int]:
    """As a peer reads them, less the words that tell what is held."""
    start = start_of(generation)
    num_all = HEADER_WORDS + max(num_words - 2, 0)
    words = region[start : start + num_all].tolist()
    return words[:num_words] if num_words < 2 else words[:2] + words[HEADER_WORDS:]


def begun(records: LeaseRecords, num_blocks: int) -> LeaseRecord:
    record = records.begin(num_blocks, HOLDING)
    assert record is not None
    return record


def test_a_record_is_where_its_reader_looks_for_it(region: "memoryview[int]") -> None:
    records = LeaseRecords(region)
    for _ in range(3):
        record = begun(records, 3)
        place = 8 * start_of(record.generation)
        assert words_at(region, record.generation, 5) == [record.generation, 3, 0, 0, 0]
        assert region.cast("B")[place + 16 : place + 48] == HOLDING
        record.put(2, LARGEST)
        record.put(0, 7)
        assert words_at(region, record.generation, 5) == [record.generation, 3, 7, 0, LARGEST]
        record.end()
        assert words_at(region, record.generation, 1) == [0]
    assert num_free(records.free) == NUM_WORDS


def test_a_record_that_has_ended_is_not_written_any_more(region: "memoryview[int]") -> None:
    records = LeaseRecords(region)
    old = begun(records, 2)
    old.end()
    old.put(1, 7)
    new = begun(records, 2)
    assert start_of(new.generation) == start_of(old.generation)
    old.put(0, 7)
    assert words_at(region, new.generation, 4) == [new.generation, 2, 0, 0]


def test_what_has_no_room_is_not_written(region: "memoryview[int]") -> None:
    """A lease that is too long has a header, and nothing of its neighbour's."""
    records = LeaseRecords(region)
    long, next_one = begun(records, MAX_DIGESTS + 1), begun(records, 1)
    assert (long.num_digests, start_of(next_one.generation)) == (0, HEADER_WORDS)
    long.put(0, 7)
    next_one.put(1, 7)
    after = begun(records, MAX_DIGESTS)
    assert words_at(region, long.generation, 2) == [long.generation, 0]
    assert words_at(region, next_one.generation, 3) == [next_one.generation, 1, 0]
    assert words_at(region, after.generation, 3) == [after.generation, MAX_DIGESTS, 0]


def test_incarnations_share_no_generation() -> None:
    found = set()
    for _ in range(3):
        region = memoryview(bytearray(REGION_BYTES)).cast("Q")
        found.add(begun(LeaseRecords(region), 0).generation)
    assert len(found) == 3
    assert max(found) < 2**53


def test_with_all_room_taken_digests_go_first_and_then_the_oldest_lease(
    region: "memoryview[int]",
) -> None:
    now = [0.0]
    leases = LeaseTable(LEASE_S, lambda: now[0], LeaseRecords(region), digests=NO_DIGESTS)

    def granted(name: str, num_blocks: int) -> int:
        now[0] += 1e-3
        return leases.grant(
            name, (tuple(range(num_blocks)),), 16, holding=HOLDING
        ).record.num_digests

    for number in range(NUM_PLACES - 1):
        assert granted(str(number), MAX_DIGESTS) == MAX_DIGESTS
    assert granted("leaves a header", MAX_DIGESTS - HEADER_WORDS) == MAX_DIGESTS - HEADER_WORDS
    assert granted("header", 1) == 0
    assert leases.take_ended() == ()
    assert granted("new", 1) == 1
    assert leases.take_ended() == ("0",)


def test_places_are_lent_to_one_pull_at_a_time(region: "memoryview[int]") -> None:
    places = RecordPlaces(region)
    lent = [places.place() for _ in range(NUM_PLACES)]
    offsets = [place.__enter__() for place in lent]
    assert len(set(offsets)) == NUM_PLACES
    size = 8 * (HEADER_WORDS + MAX_DIGESTS)
    assert sorted(offsets) == list(range(REGION_BYTES - NUM_PLACES * size, REGION_BYTES, size))
    assert min(offsets) == 8 * NUM_WORDS
    arrived = region.cast("B")[offsets[0] : offsets[0] + 56]
    words = arrived.cast("Q")
    words[0], words[1], arrived[16:48], words[6] = 7, 1, HOLDING, LARGEST
    assert places.at(offsets[0], HEADER_WORDS + 1) == ((7, 1, HOLDING), [LARGEST])
    for place in lent:
        place.__exit__(None, None, None)
    with places.place() as again:
        assert again == offsets[0]
        assert places.at(again, HEADER_WORDS)[0].generation == 0


class Runs(RuleBasedStateMachine):
    """Beside a set of free places: the lowest run that is long enough, and nothing else."""

    SIZE = 24

    def __init__(self) -> None:
        super().__init__()
        self.runs = FreeRuns(self.SIZE)
        self.free = set(range(self.SIZE))
        self.taken: list[range] = []

    @rule(length=st.integers(1, 9))
    def take(self, length: int) -> None:
        fitting = [
            start
            for start in range(self.SIZE)
            if self.free.issuperset(range(start, start + length))
        ]
        start = self.runs.take(length)
        assert start == min(fitting, default=None)
        if start is not None:
            self.taken.append(range(start, start + length))
            self.free -= set(self.taken[-1])

    @precondition(lambda self: self.taken)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        run = self.taken.pop(data.draw(st.integers(0, len(self.taken) - 1)))
        self.runs.give(run.start, len(run))
        self.free |= set(run)

    @invariant()
    def counts(self) -> None:
        assert num_free(self.runs) == len(self.free)

    def teardown(self) -> None:
        for run in self.taken:
            self.runs.give(run.start, len(run))
        assert self.runs.take(self.SIZE) == 0


class Leases(RuleBasedStateMachine):
    """Whatever happens to leases, exactly those whose blocks are held have a record, their own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.region = memoryview(bytearray(REGION_BYTES)).cast("Q")
        self.records = LeaseRecords(self.region)
        self.table = LeaseTable(LEASE_S, lambda: self.now, self.records, digests=NO_DIGESTS)
        self.every: list[LeaseRecord] = []
        self.put: dict[tuple[int, int], int] = {}

    @rule(name=NAMES, is_spare=st.booleans(), num_blocks=st.integers(0, 3))
    def grant(self, name: str, is_spare: bool, num_blocks: int) -> None:
        offsets = (tuple(range(num_blocks)),)
        lease = self.table.grant(
            name, offsets, 16, holding=HOLDING, spare_s=5.0 if is_spare else None
        )
        self.every.append(lease.record)

    @precondition(lambda self: self.every)
    @rule(data=st.data(), block=st.integers(0, 3), digest=st.integers(1, LARGEST))
    def hash(self, data: st.DataObject, block: int, digest: int) -> None:
        record = data.draw(st.sampled_from(self.every))
        record.put(block, digest)
        self.put[record.generation, block] = digest

    @rule(name=NAMES)
    def claim(self, name: str) -> None:
        self.table.claim(name)

    @rule(name=NAMES, is_exact=st.booleans())
    def release(self, name: str, is_exact: bool) -> None:
        held = self.table.claim(name) if is_exact else None
        self.table.release(name, held.generation if held else 0)

    @rule()
    def take_back(self) -> None:
        self.table.take_back()

    @rule(seconds=st.sampled_from([1.0, 6.0, LEASE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def take_ended(self) -> None:
        self.table.take_ended()

    @invariant()
    def every_lease_has_its_record(self) -> None:
        held = [lease.record for lease in self.table.all_held()]
        for record in held:
            digests = [
                self.put.get((record.generation, block), 0) for block in range(record.num_digests)
            ]
            expected = [record.generation, record.num_digests, *digests]
            assert words_at(self.region, record.generation, len(expected)) == expected

    @invariant()
    def no_other_generation_is_seen(self) -> None:
        held = {lease.generation for lease in self.table.all_held()}
        for record in self.every:
            is_seen = words_at(self.region, record.generation, 1) == [record.generation]
            assert is_seen == (record.generation in held)

    @invariant()
    def room_is_taken_for_nothing_else(self) -> None:
        held = self.table.all_held()
        taken = sum(HEADER_WORDS + lease.record.num_digests for lease in held)
        assert num_free(self.records.free) == NUM_WORDS - taken


TestRuns = Runs.TestCase
TestLeases = Leases.TestCase
