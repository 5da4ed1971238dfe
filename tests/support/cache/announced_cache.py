"""A cache that changes as it is told, says so through a recorder, and knows what it holds."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from random import Random

from engine.kv_cache.listener import Cached, CachedBlocks, CachedStates
from serving.kv_events.recorder import AnnouncedGroup, EventRecorder
from serving.kv_events.wire import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, Event

SIZE = 2
"""Tokens in a hash block."""
GROUPS = (
    AnnouncedGroup("full_attention"),
    AnnouncedGroup("mamba"),
    AnnouncedGroup("sliding_window", 5),
    AnnouncedGroup("mamba"),
)
FULL, WINDOW, STATES = 0, 2, (1, 3)

Text = tuple[int, ...]
Place = tuple[int | None, str | None, BlockHash]
Blocks = Counter[Place]


def digest(salt: str | None, text: Text) -> bytes:
    """The name of a prefix."""
    return sha256(repr((salt, text)).encode()).digest()


def count(held: Blocks, events: Iterable[Event]) -> None:
    """Follow events: every copy counts, and what is unknown cannot go."""
    for event in events:
        if isinstance(event, BlockStored | BlockRemoved):
            places = [(event.group_idx, event.medium, each) for each in event.block_hashes]
            held.update(places) if isinstance(event, BlockStored) else held.subtract(places)
            for place in places:
                if held[place] <= 0:
                    del held[place]
        else:
            held.clear()


class HeardBlocks:
    """A sink that counts, and knows by name what it was told."""

    def __init__(self) -> None:
        self.held: dict[str, Blocks] = {}

    def apply(self, name: str, events: Sequence[Event]) -> None:
        count(self.held[name], events)

    def clear(self, name: str) -> None:
        self.held[name] = Counter()

    def doubt(self, name: str, now: float) -> None:
        self.clear(name)

    def tick(self, name: str, now: float) -> None:
        pass


@dataclass(frozen=True)
class _Copy:
    """One physical stretch of blocks, or one checkpoint (`start` None), of a text."""

    group: int
    salt: str | None
    text: Text
    start: int | None

    @property
    def cached(self) -> Cached:
        end = len(self.text)
        if self.start is None:
            return CachedStates(STATES, end, digest(self.salt, self.text), (0, 0))
        ends = range(self.start + SIZE, end + 1, SIZE)
        digests = tuple(digest(self.salt, self.text[:e]) for e in ends)
        return CachedBlocks(self.group, self.start, end, digests, (0,))


class ClearingRecorder(EventRecorder):
    """A node of another project empties its cache at once, and says so in one event."""

    def cleared(self) -> None:
        self._events = [AllBlocksCleared()]


class AnnouncedCache:
    """Holds copies of stretches and checkpoints, each of its own."""

    def __init__(self) -> None:
        self.recorder = ClearingRecorder(GROUPS, SIZE)
        self._copies: list[_Copy] = []

    def store(self, text: Text, start: int, *, group: int = FULL, salt: str | None = None) -> None:
        """Keep the tokens from `start` on; in the full group only after what is there."""
        start -= start % SIZE
        while group == FULL and start and not self._has(salt, text[:start]):
            start -= SIZE
        self._add(_Copy(group, salt, text, start), start)

    def keep_states(self, text: Text, salt: str | None = None) -> None:
        """Keep a checkpoint of the whole text, once."""
        copy = _Copy(STATES[0], salt, text, None)
        if copy not in self._copies:
            self._add(copy, (len(text) - 1) // SIZE * SIZE)

    def remove(self, number: int) -> None:
        """Give up one copy and, in the full group, what would be without parents then."""
        if not self._copies:
            return
        gone = [self._copies.pop(number % len(self._copies))]
        while orphan := next((c for c in self._copies if self._is_orphan(c)), None):
            self._copies.remove(orphan)
            gone.append(orphan)
        for copy in reversed(gone):
            self.recorder.removed(copy.cached)

    def clear(self) -> None:
        """Give up everything."""
        self._copies = []
        self.recorder.cleared()

    def change(self, random: Random) -> list[Event]:
        """Some changes of one step, as events."""
        for _ in range(random.randrange(1, 4)):
            text = tuple(random.choices((1, 2), k=random.randrange(1, 12)))
            salt = random.choice((None, None, "s"))
            action = random.random()
            if action < 0.35:
                group = random.choice((FULL, FULL, WINDOW))
                self.store(text, random.randrange(len(text)), group=group, salt=salt)
            elif action < 0.55:
                self.keep_states(text, salt)
            elif action < 0.98:
                self.remove(random.randrange(1_000))
            else:
                self.clear()
        return self.recorder.take()

    @property
    def held(self) -> Blocks:
        """How often each hash is there, in each group."""
        held: Blocks = Counter()
        count(held, (event for copy in self._copies for event in self._events(copy)))
        return held

    def _add(self, copy: _Copy, start: int) -> None:
        self._copies.append(copy)
        parent, tokens = digest(copy.salt, copy.text[:start]), copy.text[start:]
        self.recorder.stored(copy.cached, parent, tokens, cache_salt=copy.salt)

    def _has(self, salt: str | None, text: Text) -> bool:
        return digest(salt, text) in self._digests()

    def _is_orphan(self, copy: _Copy) -> bool:
        needs = copy.group == FULL and copy.start
        return bool(needs) and not self._has(copy.salt, copy.text[: copy.start])

    def _digests(self) -> set[bytes]:
        copies = [copy.cached for copy in self._copies if copy.group == FULL]
        return {each for c in copies if isinstance(c, CachedBlocks) for each in c.digests}

    def _events(self, copy: _Copy) -> list[Event]:
        """By definition, beside the recorder: what one copy counts for."""
        cached = copy.cached
        is_state = isinstance(cached, CachedStates)
        hashes = (cached.digest,) if isinstance(cached, CachedStates) else cached.digests
        groups = STATES if is_state else (copy.group,)
        return [BlockStored(hashes, None, (), 0, medium="GPU", group_idx=g) for g in groups]
