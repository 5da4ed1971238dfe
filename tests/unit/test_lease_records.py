"""Records of leases: there as long as a lease lives, gone before its blocks can be used again."""

from collections.abc import Iterator

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from connector.pd.lease_records import (
    HEADER_WORDS,
    MAX_DIGESTS,
    NUM_PLACES,
    NUM_WORDS,
    FreeRuns,
    LeaseRecord,
    LeaseRecords,
    RecordPlaces,
    offset_of,
)
from connector.pd.prefill.lease_table import LeaseTable, Record
from engine.arena import MARGIN_BYTES, ArenaMemory
from tests.leases import HOLDING, LEASE_S

NAMES = st.sampled_from("abcdef")
LARGEST = 2**64 - 1


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    memory = ArenaMemory(4096 + MARGIN_BYTES)
    yield memory
    memory.close()


def words_at(arena: ArenaMemory, generation: int, num_words: int) -> list[int]:
    """As a peer reads them, less the words that tell what is held."""
    start = offset_of(generation, arena.nbytes - MARGIN_BYTES)
    num_all = HEADER_WORDS + max(num_words - 2, 0)
    words = list(arena.host_bytes()[start : start + 8 * num_all].cast("Q"))
    return words[:num_words] if num_words < 2 else words[:2] + words[HEADER_WORDS:]


def begun(records: LeaseRecords, num_blocks: int) -> LeaseRecord:
    record = records.begin(num_blocks, HOLDING)
    assert record is not None
    return record


def test_a_record_is_where_its_reader_looks_for_it(arena: ArenaMemory) -> None:
    records = LeaseRecords(arena)
    for _ in range(3):
        record = begun(records, 3)
        place = offset_of(record.generation, records.offset)
        assert place % 8 == 0
        assert place >= 4096
        assert words_at(arena, record.generation, 5) == [record.generation, 3, 0, 0, 0]
        assert arena.host_bytes()[place + 16 : place + 48] == HOLDING
        record.put(2, LARGEST)
        record.put(0, 7)
        assert words_at(arena, record.generation, 5) == [record.generation, 3, 7, 0, LARGEST]
        record.end()
        assert words_at(arena, record.generation, 1) == [0]
    assert records._free.num_free == NUM_WORDS


def test_a_record_that_has_ended_is_not_written_any_more(arena: ArenaMemory) -> None:
    records = LeaseRecords(arena)
    old = begun(records, 2)
    old.end()
    old.put(1, 7)
    new = begun(records, 2)
    assert new.start == old.start
    old.put(0, 7)
    assert words_at(arena, new.generation, 4) == [new.generation, 2, 0, 0]


def test_what_has_no_room_is_not_written(arena: ArenaMemory) -> None:
    """A lease that is too long has a header, and nothing of its neighbour's."""
    records = LeaseRecords(arena)
    long, next_one = begun(records, MAX_DIGESTS + 1), begun(records, 1)
    assert (long.num_digests, next_one.start) == (0, HEADER_WORDS)
    long.put(0, 7)
    next_one.put(1, 7)
    after = begun(records, MAX_DIGESTS)
    assert words_at(arena, long.generation, 2) == [long.generation, 0]
    assert words_at(arena, next_one.generation, 3) == [next_one.generation, 1, 0]
    assert words_at(arena, after.generation, 3) == [after.generation, MAX_DIGESTS, 0]


def test_incarnations_share_no_generation() -> None:
    found = set()
    for _ in range(3):
        arena = ArenaMemory(MARGIN_BYTES)
        found.add(begun(LeaseRecords(arena), 0).generation)
        arena.close()
    assert len(found) == 3
    assert max(found) < 2**53


def test_with_all_room_taken_digests_go_first_and_then_the_oldest_lease(
    arena: ArenaMemory,
) -> None:
    now = [0.0]
    leases = LeaseTable(LEASE_S, lambda: now[0], LeaseRecords(arena))

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


def test_places_are_lent_to_one_pull_at_a_time(arena: ArenaMemory) -> None:
    places = RecordPlaces(arena)
    lent = [places.place() for _ in range(NUM_PLACES)]
    offsets = [place.__enter__() for place in lent]
    assert len(set(offsets)) == NUM_PLACES
    size = 8 * (HEADER_WORDS + MAX_DIGESTS)
    assert sorted(offsets) == list(range(arena.nbytes - NUM_PLACES * size, arena.nbytes, size))
    assert min(offsets) == offset_of(NUM_WORDS - 1, 4096) + 8
    arrived = arena.host_bytes()[offsets[0] : offsets[0] + 56]
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
        assert self.runs.num_free == len(self.free)

    def teardown(self) -> None:
        for run in self.taken:
            self.runs.give(run.start, len(run))
        assert self.runs.take(self.SIZE) == 0


class Leases(RuleBasedStateMachine):
    """Whatever happens to leases, exactly those whose blocks are held have a record, their own."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.arena = ArenaMemory(MARGIN_BYTES)
        self.records = LeaseRecords(self.arena)
        self.table = LeaseTable(LEASE_S, lambda: self.now, self.records)
        self.every: list[Record] = []
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
            assert words_at(self.arena, record.generation, len(expected)) == expected

    @invariant()
    def no_other_generation_is_seen(self) -> None:
        held = {lease.generation for lease in self.table.all_held()}
        for record in self.every:
            is_seen = words_at(self.arena, record.generation, 1) == [record.generation]
            assert is_seen == (record.generation in held)

    @invariant()
    def room_is_taken_for_nothing_else(self) -> None:
        held = self.table.all_held()
        taken = sum(HEADER_WORDS + lease.record.num_digests for lease in held)
        assert self.records._free.num_free == NUM_WORDS - taken

    def teardown(self) -> None:
        self.arena.close()


TestRuns = Runs.TestCase
TestLeases = Leases.TestCase
