"""What the scheduler asks of the KV cache: find a hit, start from it, grow, publish, give back.

All-or-nothing without side effects on failure. A block or checkpoint becomes findable only after
its bytes are complete, and a shared one is never written: who extends it gets a copy. Torch-free.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.checkpoints import checkpoint_worth
from engine.kv_cache.coordinator import Coordinator, PrefixHit
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.prefix_index import PrefixKey
from engine.kv_cache.spec import MambaSpec, SlidingWindowSpec
from engine.kv_cache.tables import NULL_BLOCK, BlockTables

BLOCK_WORTH = 1.0


@dataclass(slots=True, frozen=True)
class BlockCopy:
    """The worker copies a block or state before it computes anything else."""

    group: int
    source: int
    target: int


@dataclass(slots=True, frozen=True)
class Checkpoint:
    """The worker writes the state after `num_tokens` tokens into `states[g]` of Mamba group g."""

    num_tokens: int
    states: dict[int, int]


@dataclass(slots=True, frozen=True)
class _Pending:
    """A copy under way: both ends are in use until it is done; `key` publishes the target then."""

    copy: BlockCopy
    key: PrefixKey | None = None
    worth: float = 0.0


class KVCacheManager:
    """Owner of all units of one arena.

    `hash_seed`: equal on all nodes of a cluster. Without `prefix_caching` nothing is ever findable.
    `checkpoint_share`: the part of all units that idle checkpoints may fill.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        *,
        hash_seed: str = "",
        prefix_caching: bool = True,
        checkpoint_share: float = 0.5,
    ) -> None:
        self.plan = plan
        self.hasher = PrefixHasher(plan.hash_block_size, hash_seed)
        self._caches_prefixes = prefix_caching
        self.pool = BlockPool(plan)
        self._coordinator = Coordinator(plan, self.pool.index)
        self._max_idle_states = int(checkpoint_share * plan.num_units)
        self._groups = range(len(plan.groups))
        self._states = tuple(g for g in self._groups if isinstance(plan.groups[g].spec, MambaSpec))
        self._live: dict[int, BlockTables] = {}
        self._new_states: list[tuple[int, int]] = []
        self._pending: list[_Pending] = []
        self._reserved: dict[int, Checkpoint] = {}

    @property
    def usage(self) -> float:
        """Share of units of which something is in use, 0 to 1."""
        return 1.0 - self.pool.num_idle_units / self.plan.num_units

    @property
    def num_free_units(self) -> int:
        """Units of which nothing is in use; what they hold gives way when they are needed."""
        return self.pool.num_idle_units

    @property
    def num_states(self) -> int:
        """Mamba states in use."""
        return self.pool.num_states

    def find_hit(self, prefix: PrefixDigests, limit: int, *, skip_mamba: bool = False) -> PrefixHit:
        """The longest cached prefix of at most `limit` tokens; see `Coordinator.find`."""
        if not self._caches_prefixes:
            return PrefixHit(0, tuple(() for _ in self._groups), 0)
        return self._coordinator.find(prefix, limit, skip_mamba=skip_mamba)

    def start(self, hit: PrefixHit, num_tokens: int) -> BlockTables | None:
        """Tables of a new request that starts from `hit` and holds `num_tokens` tokens, or None."""
        shared = [(g, b) for g in self._groups for b in hit.blocks[g] if b != NULL_BLOCK]
        counts = [
            self.plan.blocks_for(g, num_tokens) - self._num_kept(g, hit) for g in self._groups
        ]
        if not self.pool.fits(counts, shared):
            return None
        for group, block in shared:
            self.pool.share(group, block)
        new = self.pool.allocate(counts, [self._last_kept(g, hit) for g in self._groups])
        assert new is not None
        return self._begin(hit, new)

    def grow(self, tables: BlockTables, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens; False, and nothing done, when there is none."""
        owned = tables.groups
        counts = [max(0, self.plan.blocks_for(g, num_tokens) - len(owned[g])) for g in self._groups]
        if not any(counts):
            return True
        new = self.pool.allocate(counts, [blocks[-1] if blocks else None for blocks in owned])
        if new is None:
            return False
        for blocks, more in zip(owned, new, strict=True):
            blocks += more
        return True

    def reserve_checkpoints(
        self, prefix: PrefixDigests, positions: Sequence[int]
    ) -> tuple[Checkpoint, ...]:
        """Rooms for the states after `positions` tokens, as far as the budget and memory allow."""
        checkpoints = (self._reserve_checkpoint(prefix, position) for position in positions)
        return tuple(checkpoint for checkpoint in checkpoints if checkpoint is not None)

    def publish(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        """The first `num_tokens` are computed: whole blocks become findable, passed ones go."""
        for group in self._groups:
            if group not in self._states:
                if self._caches_prefixes:
                    self._publish_blocks(group, tables, prefix, num_tokens=num_tokens)
                self._leave_window(group, tables, num_tokens)

    def publish_checkpoints(
        self, tables: BlockTables, prefix: PrefixDigests, checkpoints: Sequence[Checkpoint]
    ) -> None:
        """The worker has written these states: they become checkpoints."""
        for checkpoint in checkpoints:
            worth = self._worth(tables, checkpoint.num_tokens)
            key = PrefixKey.of(prefix, checkpoint.num_tokens)
            for group, state in checkpoint.states.items():
                self.pool.publish(group, state, key, worth=worth)
        self.drop_checkpoints(checkpoints)

    def drop_checkpoints(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Gives the rooms back; what is published stays as long as nobody needs its room."""
        for checkpoint in checkpoints:
            del self._reserved[id(checkpoint)]
            for group, state in checkpoint.states.items():
                self.pool.release(group, [state])

    def keep_loaded(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        """What was pulled becomes findable at its exact length; the state, by a copy of it."""
        self.publish(tables, prefix, num_tokens)
        if not self._caches_prefixes:
            return
        self._publish_partial(tables, prefix, num_tokens)
        checkpoint = self._reserve_checkpoint(prefix, num_tokens)
        if checkpoint is None:
            return
        del self._reserved[id(checkpoint)]
        key, worth = PrefixKey.of(prefix, num_tokens), self._worth(tables, num_tokens)
        for group, target in checkpoint.states.items():
            source = tables.groups[group][0]
            self.pool.share(group, source)
            self._pending.append(_Pending(BlockCopy(group, source, target), key, worth))

    def retire(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        """The request computes no more: its own state and last block serve as a checkpoint."""
        if num_tokens == 0 or not self._caches_prefixes:
            return
        self.publish(tables, prefix, num_tokens)
        self._publish_partial(tables, prefix, num_tokens)
        key, worth = PrefixKey.of(prefix, num_tokens), self._worth(tables, num_tokens)
        for group in self._states:
            self.pool.publish(group, tables.groups[group][0], key, worth=worth)

    def free(self, tables: BlockTables) -> None:
        """Gives all blocks and states of one request back, last ones first."""
        del self._live[id(tables)]
        targets = {(g, block) for g in self._groups for block in tables.used(g)}
        self._new_states = [state for state in self._new_states if state not in targets]
        cancelled = [
            p for p in self._pending if p.key is None and (p.copy.group, p.copy.target) in targets
        ]
        self._pending = [pending for pending in self._pending if pending not in cancelled]
        for pending in cancelled:
            self.pool.release(pending.copy.group, [pending.copy.source])
        for group in self._groups:
            self.pool.release(group, reversed(tables.used(group)))
        self._trim_checkpoints()

    def take_new_states(self) -> tuple[tuple[int, int], ...]:
        """(group, state) that start from nothing; the worker zeroes them before use."""
        new, self._new_states = tuple(self._new_states), []
        return new

    def copies(self) -> tuple[BlockCopy, ...]:
        """What the worker copies before it computes; call `copies_done` once it has."""
        return tuple(pending.copy for pending in self._pending)

    def copies_done(self) -> None:
        """All copies are complete: sources are let go, and pulled states become checkpoints."""
        done, self._pending = self._pending, []
        for pending in done:
            self.pool.release(pending.copy.group, [pending.copy.source])
            if pending.key is not None:
                copy = pending.copy
                self.pool.publish(copy.group, copy.target, pending.key, worth=pending.worth)
                self.pool.release(copy.group, [copy.target])
        self._trim_checkpoints()

    def reset(self) -> None:
        """Forgets everything that nobody uses."""
        self.pool.clear()

    def check(self) -> None:
        """Recounts every unit, block, reference and digest; AssertionError on a difference."""
        used: tuple[Counter[int], ...] = tuple(Counter() for _ in self._groups)
        for tables in self._live.values():
            for group in self._groups:
                used[group].update(tables.used(group))
        for checkpoint in self._reserved.values():
            for group, state in checkpoint.states.items():
                used[group][state] += 1
        for pending in self._pending:
            used[pending.copy.group][pending.copy.source] += 1
            used[pending.copy.group][pending.copy.target] += pending.key is not None
        self.pool.check(used)

    def _num_kept(self, group: int, hit: PrefixHit) -> int:
        """Blocks of the hit that the new request's own table lists: not the one that it extends."""
        if group in self._states:
            return 0
        return hit.num_tokens // self.plan.block_size_of(group)

    def _last_kept(self, group: int, hit: PrefixHit) -> int | None:
        kept = hit.blocks[group][: self._num_kept(group, hit)]
        return kept[-1] if kept and kept[-1] != NULL_BLOCK else None

    def _begin(self, hit: PrefixHit, new: Sequence[list[int]]) -> BlockTables:
        groups = []
        for group, blocks in enumerate(new):
            kept = self._num_kept(group, hit)
            groups.append([*hit.blocks[group][:kept], *blocks])
            for source in hit.blocks[group][kept:]:
                self._pending.append(_Pending(BlockCopy(group, source, blocks[0])))
            if group in self._states and not hit.blocks[group]:
                self._new_states.append((group, blocks[0]))
        published = [self._num_kept(group, hit) for group in self._groups]
        tables = BlockTables(tuple(groups), published, num_checkpointed=hit.num_tokens)
        self._live[id(tables)] = tables
        return tables

    def _reserve_checkpoint(self, prefix: PrefixDigests, num_tokens: int) -> Checkpoint | None:
        if not self._states or not self._caches_prefixes:
            return None
        if self.pool.index.find(self._states[0], prefix.at(num_tokens)) is not None:
            return None
        self._trim_checkpoints()
        counts = [int(group in self._states) for group in self._groups]
        new = self.pool.allocate(counts, [None] * len(counts))
        if new is None:
            return None
        checkpoint = Checkpoint(num_tokens, {group: new[group][0] for group in self._states})
        self._reserved[id(checkpoint)] = checkpoint
        return checkpoint

    def _trim_checkpoints(self) -> None:
        while self.pool.num_idle_states > self._max_idle_states:
            self.pool.drop_idle_state()

    def _worth(self, tables: BlockTables, num_tokens: int) -> float:
        saved = num_tokens - tables.num_checkpointed
        tables.num_checkpointed = num_tokens
        return checkpoint_worth(self.plan, max(0, saved))

    def _publish_blocks(
        self, group: int, tables: BlockTables, prefix: PrefixDigests, *, num_tokens: int
    ) -> None:
        size = self.plan.block_size_of(group)
        for place in range(tables.num_published[group], num_tokens // size):
            block = tables.groups[group][place]
            if block != NULL_BLOCK:
                key = PrefixKey.of(prefix, (place + 1) * size)
                self.pool.publish(group, block, key, worth=BLOCK_WORTH)
        tables.num_published[group] = max(tables.num_published[group], num_tokens // size)

    def _publish_partial(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        for group in self._groups:
            if group in self._states or not num_tokens % self.plan.block_size_of(group):
                continue
            block = tables.groups[group][num_tokens // self.plan.block_size_of(group)]
            key = PrefixKey.of(prefix, num_tokens)
            self.pool.publish(group, block, key, worth=BLOCK_WORTH)

    def _leave_window(self, group: int, tables: BlockTables, num_tokens: int) -> None:
        spec = self.plan.groups[group].spec
        if not isinstance(spec, SlidingWindowSpec):
            return
        passed = spec.first_needed(num_tokens) // self.plan.block_size_of(group)
        blocks = tables.groups[group]
        for place in range(tables.num_passed[group], passed):
            if blocks[place] != NULL_BLOCK:
                self.pool.release(group, [blocks[place]])
                blocks[place] = NULL_BLOCK
        tables.num_passed[group] = max(tables.num_passed[group], passed)
