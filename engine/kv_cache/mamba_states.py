"""Mamba states: one set per running request, and checkpoints, which are sets that are findable.

A set has the state of every Mamba group after the same tokens, one unit each; it is shared, kept
and evicted as a whole. Idle checkpoints have a budget of units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.attention_group import GroupHit, Lookup
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.checkpoints import worth_per_token
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.prefix_index import partial_key
from engine.kv_cache.run import PartialKey, Run, Units
from engine.kv_cache.tables import BlockTables
from engine.kv_cache.unit_allocator import Wants


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Room for the states of all Mamba `groups` after `num_tokens` tokens."""

    num_tokens: int
    groups: tuple[int, ...]
    run: Run
    key: PartialKey

    @property
    def states(self) -> dict[int, int]:
        """The worker writes the state of Mamba group g into `states[g]`."""
        return dict(zip(self.groups, self.run.blocks, strict=True))


class StateLookup(Lookup):
    """Can resume where a checkpoint stands; the empty prefix needs none."""

    def __init__(self, pool: BlockPool, prefix: PrefixDigests, group: int) -> None:
        self._index = pool.indexes[group]
        self._prefix = prefix

    def longest(self, limit: int) -> int:
        found = self._find(limit)
        return 0 if found is None else found[0]

    def hit(self, num_tokens: int) -> GroupHit:
        found = self._find(num_tokens)
        return GroupHit() if found is None else GroupHit(source=(found[1], found[1].end))

    def _find(self, limit: int) -> tuple[int, Run] | None:
        return self._index.longest_partial(self._prefix, 0, limit) if self._index.partial else None


class MambaStates:
    """All Mamba groups of one arena. `max_idle_units`: what idle checkpoints may fill.

    `wants`: the room that one set needs.
    """

    def __init__(self, plan: ArenaPlan, pool: BlockPool, *, max_idle_units: int) -> None:
        self.groups = plan.state_groups
        self.wants: Wants = {self.groups[0]: (len(self.groups), None)}
        self.reserved: dict[Checkpoint, Run] = {}
        self._worth_per_token = worth_per_token(plan)
        self._pool = pool
        self._max_idle = max_idle_units // len(self.groups)
        self._new: list[Run] = []

    def lookup(self, prefix: PrefixDigests) -> StateLookup:
        """Starts the lookup of one prefix."""
        return StateLookup(self._pool, prefix, self.groups[0])

    def begin(self, states: list[int], units: Units, *, is_new: bool) -> Run:
        """The states of a request, in use once; new ones have to be zeroed."""
        run = self._pool.form_states(states, units)
        if is_new:
            self._new.append(run)
        return run

    def take_new(self) -> tuple[tuple[int, int], ...]:
        """(group, state) that start from nothing."""
        if not self._new:
            return ()
        runs, self._new = self._new, []
        return tuple(state for run in runs for state in zip(self.groups, run.blocks, strict=True))

    def reserve(self, prefix: PrefixDigests, num_tokens: int) -> Checkpoint | None:
        """Room for the states after `num_tokens` tokens; None if kept already, or without room."""
        key = partial_key(prefix, num_tokens)
        if self._pool.indexes[self.groups[0]].find(key) is not None:
            return None
        self.trim()
        new = self._pool.allocate(self.wants)
        if new is None:
            return None
        run = self._pool.form_states(*new[self.groups[0]])
        checkpoint = Checkpoint(num_tokens, self.groups, run, key)
        self.reserved[checkpoint] = run
        return checkpoint

    def publish(self, tables: BlockTables, checkpoint: Checkpoint) -> None:
        """The states of a reserved checkpoint are complete."""
        self._publish(checkpoint.run, tables, checkpoint.key, num_tokens=checkpoint.num_tokens)

    def retire(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        """A request writes its own states no more: they become a checkpoint as they are."""
        assert tables.state is not None
        key = partial_key(prefix, num_tokens)
        self._publish(tables.state, tables, key, num_tokens=num_tokens)

    def drop(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Gives reserved rooms back; what is published stays as long as nobody needs its room."""
        for checkpoint in checkpoints:
            del self.reserved[checkpoint]
            self._pool.release(checkpoint.run)

    def free(self, run: Run) -> None:
        """A request needs its states no more."""
        self._new = [new for new in self._new if new is not run]
        self._pool.release(run)
        self.trim()

    def trim(self) -> None:
        """Evicts idle checkpoints over the budget."""
        while self._pool.num_idle_checkpoints > self._max_idle:
            self._pool.drop_idle_checkpoint()

    def _publish(self, run: Run, tables: BlockTables, key: PartialKey, *, num_tokens: int) -> None:
        """Worth the tokens since the last checkpoint on the way."""
        saved = max(0, num_tokens - tables.num_checkpointed)
        tables.num_checkpointed = num_tokens
        self._pool.publish_partial(run, key, worth=saved * self._worth_per_token)
