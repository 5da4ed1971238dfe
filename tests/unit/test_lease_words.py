"""Words of leases: there as long as a lease lives, gone before its blocks can be used again."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from connector.pd import lease_words
from connector.pd.lease import LeaseTable
from connector.pd.lease_words import NUM_PLACES, NUM_WORDS, LeaseWords, WordPlaces, offset_of
from engine.arena import MARGIN_BYTES, ArenaMemory

LEASE_S = 30.0
NAMES = st.sampled_from("abcdef")


@pytest.fixture
def arena() -> Iterator[ArenaMemory]:
    memory = ArenaMemory(4096 + MARGIN_BYTES)
    yield memory
    memory.close()


def words_of(arena: ArenaMemory) -> list[int]:
    """All that are not empty."""
    words = arena.tensor[arena.nbytes - MARGIN_BYTES :].view(torch.int64)
    return [int(word) for word in words[words != 0]]


def test_a_word_is_where_its_reader_looks_for_it(arena: ArenaMemory) -> None:
    words = LeaseWords(arena)
    for _ in range(3):
        generation = words.begin()
        place = offset_of(generation, words.offset)
        assert place % 8 == 0
        assert place >= 4096
        found = arena.tensor[place : place + 8].view(torch.int64)
        assert int(found) == generation
        words.end(generation)
        assert int(found) == 0


def test_a_word_is_never_written_over_another(
    arena: ArenaMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lease_words, "NUM_WORDS", 4)
    words = LeaseWords(arena)
    kept = words.begin()
    for _ in range(20):
        other = words.begin()
        assert sorted(words_of(arena)) == sorted((kept, other))
        words.end(other)


def test_incarnations_share_no_generation() -> None:
    found = set()
    for _ in range(3):
        arena = ArenaMemory(MARGIN_BYTES)
        found.add(LeaseWords(arena).begin())
        arena.close()
    assert len(found) == 3


def test_with_every_word_taken_the_oldest_lease_ends(arena: ArenaMemory) -> None:
    now = [0.0]
    leases = LeaseTable(LEASE_S, lambda: now[0], LeaseWords(arena))
    for number in range(NUM_WORDS + 2):
        now[0] += 1e-4
        leases.grant(str(number), ((0,),), 16)
    assert leases.take_ended() == ("0", "1")
    assert len(words_of(arena)) == len(leases) == NUM_WORDS


def test_places_are_lent_to_one_pull_at_a_time(arena: ArenaMemory) -> None:
    places = WordPlaces(arena)
    lent = [places.place() for _ in range(NUM_PLACES)]
    offsets = [place.__enter__() for place in lent]
    assert len(set(offsets)) == NUM_PLACES
    assert max(offsets) + 8 == arena.nbytes
    assert min(offsets) == offset_of(NUM_WORDS - 1, 4096) + 8
    arena.tensor[offsets[0]] = 7
    assert places.at(offsets[0]) == 7
    for place in lent:
        place.__exit__(None, None, None)
    with places.place() as again:
        assert again == offsets[0]
        assert places.at(again) == 0


class Leases(RuleBasedStateMachine):
    """Whatever happens to leases, exactly those whose blocks are held have a word."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.arena = ArenaMemory(MARGIN_BYTES)
        self.table = LeaseTable(LEASE_S, lambda: self.now, LeaseWords(self.arena))

    @rule(name=NAMES, is_spare=st.booleans())
    def grant(self, name: str, is_spare: bool) -> None:
        self.table.grant(name, ((0,),), 16, spare_s=5.0 if is_spare else None)

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
    def every_lease_has_its_word(self) -> None:
        held = sorted(lease.generation for lease in self.table.all_held())
        assert sorted(words_of(self.arena)) == held

    def teardown(self) -> None:
        self.arena.close()


TestLeases = Leases.TestCase
