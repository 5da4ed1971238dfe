"""The positions at which a prefill keeps its Mamba states for reuse, learned from what is found.

Every request leaves the state at its end, which costs no copy. States before the end are copies:
some workloads find them again (other questions about one document, the same prompt twice), others
never do, and then a state only takes the room of blocks. So each kind of position is kept while it
pays, and tried again from time to time (figures: benchmarks/pages/kv_cache_policies.md).
"""

from collections.abc import Iterable
from enum import StrEnum

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import MambaSpec

TAIL = 2048
INTERVAL = 16_384
ENOUGH_EVICTED = 16
"""Unread states that give way before a reason has to prove its worth: fewer may be chance."""
TRY_EVERY = 8
"""Chances between two tries of a reason that does not pay, so that it can prove itself again."""
MEMORY = 0.98
"""The weight of older experience shrinks so with each new one: about fifty count."""


class Reason(StrEnum):
    """The reason for keeping a state where it is.

    END: a request ended there. LAST: the last block boundary of a prompt, for the same prompt
    again. BRANCH: a prompt left a cached one there. TAIL: some 2,048 tokens before LAST, for
    prompts that differ near their ends. INTERVAL: every 16,384 tokens, for all others. HINT: the
    caller named it, and may be wrong, or want more than its share.
    """

    END = "end"
    LAST = "last"
    BRANCH = "branch"
    TAIL = "tail"
    INTERVAL = "interval"
    HINT = "hint"


class CheckpointPolicy:
    """Chooses positions by what the states that were kept for each reason have been worth.

    A reason pays while hardly any of its states are evicted unread, so with enough memory all are
    kept. After that it pays if its states save as many tokens as the states at the ends of
    requests. One that does not is tried at every `TRY_EVERY`th chance. Branch points always pay:
    prompts have parted there already. Pure, and deterministic.
    """

    def __init__(self, *, tail: int = TAIL, interval: int = INTERVAL) -> None:
        self._tail = tail
        self._interval = interval
        # By reason, older ones fading: states found or evicted unread, the latter, tokens saved.
        self._count = dict.fromkeys(Reason, 0.0)
        self._evicted = dict.fromkeys(Reason, 0.0)
        self._saved = dict.fromkeys(Reason, 0.0)
        self._num_skipped = 0

    def positions(
        self,
        num_hit_tokens: int,
        branch_point: int,
        num_prompt_tokens: int,
        *,
        block_size: int,
        hints: Iterable[int] = (),
    ) -> dict[int, Reason]:
        """Token counts after the hit, ascending, at which the state is worth keeping, and why.

        None is after the prompt's last boundary before its last token. `hints` behind the prompt
        count for nothing. All but the `branch_point`, where this prompt leaves a longer cached one
        that had no checkpoint there, are rounded down to multiples of `block_size`, at which
        attention of all groups can be hit: hash boundaries.
        """
        last = (num_prompt_tokens - 1) // block_size * block_size
        wanted: dict[int, Reason] = {}
        # First: where there is a better reason too, the hint gets no credit for it.
        named = [position for position in hints if position <= num_prompt_tokens]
        if named and self._pays(Reason.HINT):
            wanted.update(dict.fromkeys(named, Reason.HINT))
        if last > self._interval and self._pays(Reason.INTERVAL):
            spread = range(self._interval, last, self._interval)
            wanted.update(dict.fromkeys(spread, Reason.INTERVAL))
        if last > self._tail and self._pays(Reason.TAIL):
            wanted[last - self._tail] = Reason.TAIL
        if self._pays(Reason.LAST):
            wanted[last] = Reason.LAST
        rounded = {p // block_size * block_size: reason for p, reason in wanted.items()}
        rounded[branch_point] = Reason.BRANCH
        return {p: rounded[p] for p in sorted(rounded) if num_hit_tokens < p <= last}

    def found(self, reason: Reason, num_saved_tokens: int) -> None:
        """A request started from such a state for the first time."""
        self._note(reason, num_saved_tokens, evicted=0)

    def evicted_unread(self, reason: Reason) -> None:
        """Such a state gave way before any request started from it."""
        self._note(reason, 0, evicted=1)

    def _note(self, reason: Reason, num_saved_tokens: int, *, evicted: int) -> None:
        self._count[reason] = self._count[reason] * MEMORY + 1
        self._evicted[reason] = self._evicted[reason] * MEMORY + evicted
        self._saved[reason] = self._saved[reason] * MEMORY + num_saved_tokens

    def _pays(self, reason: Reason) -> bool:
        if self._evicted[reason] < ENOUGH_EVICTED:
            return True
        # The end of a request is the fair yardstick: its state takes the same room.
        if self._worth(reason) > 0 and self._worth(reason) >= self._worth(Reason.END):
            return True
        self._num_skipped += 1
        return self._num_skipped % TRY_EVERY == 0

    def _worth(self, reason: Reason) -> float:
        """Tokens saved per state."""
        return self._saved[reason] / max(1.0, self._count[reason])


def decode_positions(
    num_prompt_tokens: int, start: int, end: int, *, interval: int
) -> tuple[int, ...]:
    """Token counts after the prompt, ascending, that tokens `start` to `end` reach.

    Every multiple of `interval`; 0 keeps no state while a request decodes.
    """
    if not interval:
        return ()
    first = max(num_prompt_tokens, start) // interval + 1
    return tuple(range(first * interval, end + 1, interval))


def due(positions: Iterable[int], start: int, end: int) -> tuple[int, ...]:
    """The positions that a chunk from `start` to `end` reaches."""
    return tuple(p for p in positions if start < p <= end)


def value_per_token(plan: ArenaPlan) -> float:
    """The saving per byte of a checkpoint, for each token since the one before it.

    Relative to an attention block, whose value is 1.
    """
    sizes = {True: 0.0, False: 0.0}
    for group, members in enumerate(plan.groups):
        is_state = isinstance(members.spec, MambaSpec)
        per = 1 if is_state else plan.block_size_of(group)
        sizes[is_state] += plan.block_bytes(group) / per
    return (sizes[False] or 1.0) / (sizes[True] or 1.0)
