"""The KV cache as the scheduler uses it: find a hit, start from it, grow, publish, give back.

All-or-nothing without side effects on failure. A block or checkpoint becomes findable only after
its bytes are complete. A shared one is never written: a request that extends it gets a copy.
Torch-free.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.checkpoints import Reason
from engine.kv_cache.coordinator import Coordinator, PrefixHit, attention_kinds
from engine.kv_cache.coverage import NOTHING, Coverage
from engine.kv_cache.listener import CacheListener
from engine.kv_cache.mamba_states import Checkpoint, MambaStates
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.kv_cache.radix_tree import TreeNode
from engine.kv_cache.tables import BlockCopy, BlockTables
from engine.kv_cache.unit_allocator import NewBlocks

Pin = tuple[TreeNode, ...]  # cached blocks and states that stay where they are until `unpin`


@dataclass(slots=True)
class _Pending:
    """A copy under way: `source` is in use until it is done.

    Of the last block of `source` or of its states, into `targets`: the request's own, or those of a
    `checkpoint` of pulled states.
    """

    source: TreeNode
    targets: list[int]
    owner: BlockTables
    checkpoint: Checkpoint | None = None


class KVCacheManager:
    """Owner of all units of one arena.

    `hash_seed`: equal on all nodes of a cluster. Without `prefix_caching` nothing is ever findable.
    `checkpoint_share`: the part of all units that idle checkpoints may fill. `listener`: hears what
    becomes findable, and what goes.
    """

    def __init__(
        self,
        plan: ArenaPlan,
        *,
        hash_seed: str = "",
        prefix_caching: bool = True,
        checkpoint_share: float = 0.5,
        listener: CacheListener | None = None,
    ) -> None:
        self.plan = plan
        self.hasher = PrefixHasher(plan.hash_block_size, hash_seed)
        self.pool = BlockPool(plan, listener)
        self._caches_prefixes = prefix_caching
        self._no_prefix = PrefixDigests(self.hasher, [], None)
        self._attention = attention_kinds(plan)
        budget = int(checkpoint_share * plan.num_units)
        self.states = MambaStates(self.pool, max_idle_units=budget)
        self._coordinator = Coordinator(self.pool, self.states)
        self._pending: list[_Pending] = []

    @property
    def usage(self) -> float:
        """Share of units of which something is in use, 0 to 1."""
        return self.pool.units.num_used_units / self.plan.num_units

    @property
    def units_by_use(self) -> dict[str, int]:
        """Units by what they hold; those of idle attention blocks are what is left."""
        units, plan = self.pool.units, self.plan
        used = [len(units.used[group]) for group in range(len(plan.groups))]
        states = sum(used[group] for group in plan.state_groups)
        known = {
            "attention": sum(used) - states,
            "states": states,
            "idle_states": self.states.num_idle,
        }
        # Read from another thread, so the parts may be of different moments.
        idle = plan.num_units - units.num_free_units - sum(known.values())
        return {"num_units": plan.num_units, "idle_attention": max(0, idle), **known}

    def find_hit(
        self,
        prefix: PrefixDigests,
        limit: int,
        external: Coverage = NOTHING,
        *,
        reuse: bool = True,
    ) -> PrefixHit:
        """The best start within `limit` tokens, here or from `external`; `Coordinator.find`.

        Without `reuse` nothing that is here counts.
        """
        known = prefix if self._caches_prefixes and reuse else self._no_prefix
        return self._coordinator.find(known, limit, external)

    def start(self, hit: PrefixHit, num_tokens: int) -> BlockTables | None:
        """Tables of a new request that starts from `hit` and holds `num_tokens` tokens, or None."""
        needed = dict(self.states.one_set)
        for group, part in hit.attention.items():
            count = self.plan.blocks_for(group, num_tokens) - len(part.blocks)
            # After the last shared block, so that neighbours in the sequence are neighbours here.
            needed[group] = count, part.blocks[-1] if part.shares and part.blocks else None
        if not (self.pool.units.can_allocate(needed) or self.pool.fits(needed, hit.needs)):
            return None
        # All hits are in use before anything is allocated, so that none is evicted for the rest.
        attention = {
            group: kind.table(self.pool, group, hit.attention[group])
            for group, kind in self._attention.items()
        }
        if hit.states.source is not None:
            self.states.found(hit.states.source[0])
        parts = (*hit.attention.values(), hit.states)
        sources = [self.pool.share(*part.source) for part in parts if part.source is not None]
        new = self.pool.allocate(needed)
        assert new is not None
        groups: list[list[int]] = [[] for _ in self.plan.groups]
        for group, table in attention.items():
            table.take(new[group])
            groups[group] = table.blocks
        has_states = hit.states.source is not None
        state = self.states.begin(new, is_new=not has_states)
        for group, unit in zip(self.states.groups, state.blocks if state else (), strict=True):
            groups[group] = [unit]
        num_checkpointed = hit.num_tokens if has_states else hit.num_local
        tables = BlockTables(tuple(groups), attention, state, num_checkpointed, hit.num_tokens)
        self._pending += [_Pending(source, new[source.group][0], tables) for source in sources]
        return tables

    def grow(self, tables: BlockTables, num_tokens: int) -> bool:
        """Makes room for `num_tokens` tokens; False, and nothing done, when there is none."""
        missing: NewBlocks = {}
        for table in tables.attention.values():
            missing.update(table.missing(num_tokens))
        if not missing:
            return True
        new = self.pool.allocate(missing)
        if new is None:
            return False
        for group, each in new.items():
            tables.attention[group].take(each)
        return True

    def plan_checkpoints(
        self,
        tables: BlockTables,
        hit: PrefixHit,
        num_prompt_tokens: int,
        *,
        hints: Sequence[int] = (),
    ) -> None:
        """Decides after which tokens of the prompt states are kept: `tables.checkpoints`.

        `hints`: token counts that the caller named.
        """
        tables.checkpoints = self.states.policy.positions(
            hit.num_tokens,
            hit.branch_point,
            num_prompt_tokens,
            block_size=self.plan.hash_block_size,
            hints=hints,
        )

    def reserve_checkpoints(
        self, prefix: PrefixDigests, positions: Sequence[int]
    ) -> tuple[Checkpoint, ...]:
        """Rooms for the states after `positions` tokens, as far as the budget and memory allow."""
        if not positions or not self._caches_prefixes:
            return ()
        checkpoints = [self.states.reserve(prefix, position) for position in positions]
        return tuple(checkpoint for checkpoint in checkpoints if checkpoint is not None)

    def publish(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        """The first `num_tokens` are computed: whole blocks become findable, passed ones go."""
        for table in tables.attention.values():
            if self._caches_prefixes:
                table.publish(prefix, num_tokens)
            table.leave(num_tokens)

    def publish_checkpoints(self, tables: BlockTables, checkpoints: Sequence[Checkpoint]) -> None:
        """The worker has written these states: they become checkpoints."""
        for checkpoint in checkpoints:
            node, prefix, key = checkpoint.node, checkpoint.prefix, checkpoint.key
            reason = tables.checkpoints.get(checkpoint.num_tokens)
            self.states.publish(tables, node, prefix, key=key, reason=reason)
        self.states.drop(checkpoints)

    def keep_good(
        self,
        tables: BlockTables,
        prefix: PrefixDigests,
        num_good: int,
        *,
        num_loaded: int,
        filled_from: Sequence[int] = (),
    ) -> None:
        """Publishes the first `num_good` tokens of a load of `num_loaded` that failed."""
        self._leave_unloaded(tables, num_loaded, filled_from)
        self.publish(tables, prefix, num_good)

    def keep_loaded(
        self,
        tables: BlockTables,
        prefix: PrefixDigests,
        num_tokens: int,
        *,
        filled_from: Sequence[int] = (),
    ) -> None:
        """Publishes loaded blocks up to the exact length, and a copy of the loaded states.

        `filled_from`: by group the first token that the load has filled in; all of its blocks, if
        it is empty.
        """
        self._leave_unloaded(tables, num_tokens, filled_from)
        self._publish_all(tables, prefix, num_tokens)
        # A copy, since the request goes on from its own state and overwrites it.
        for checkpoint in self.reserve_checkpoints(prefix, [num_tokens]):
            assert tables.state is not None
            source = self.pool.share(tables.state, tables.state.end)
            targets = checkpoint.node.blocks
            self._pending.append(_Pending(source, targets, tables, checkpoint))

    def retire(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        """Publishes the state and last block of a request that has ended as a checkpoint."""
        if num_tokens == 0 or not self._caches_prefixes:
            return
        self._publish_all(tables, prefix, num_tokens)
        if tables.state is not None:
            key = prefix.key(num_tokens)
            self.states.publish(tables, tables.state, prefix, key=key, reason=Reason.END)

    def free(self, tables: BlockTables) -> None:
        """Gives all blocks and states of one request back, last ones first."""
        # A copy into a checkpoint goes on without the request; one into its own blocks does not.
        cancelled = [p for p in self._pending if p.owner is tables and p.checkpoint is None]
        self._pending = [pending for pending in self._pending if pending not in cancelled]
        for pending in cancelled:
            self.pool.release(pending.source)
        for group, table in tables.attention.items():
            nodes, own = table.held()
            self.pool.free(group, own)
            # Ends become idle before roots, so that they are evicted first.
            for node in reversed(nodes):
                self.pool.release(node)
        self.states.free(tables.state)

    def copies(self) -> tuple[BlockCopy, ...]:
        """The copies that the worker makes before it computes; call `copies_done` after that."""
        copies: list[BlockCopy] = []
        for pending in self._pending:
            source, targets = pending.source, pending.targets
            if source.group in self._attention:
                copies.append(BlockCopy(source.group, source.blocks[-1], targets[0]))
            else:
                copies += map(BlockCopy, self.states.groups, source.blocks, targets)
        return tuple(copies)

    def copies_done(self) -> None:
        """All copies are complete: sources are let go, and pulled states become checkpoints."""
        done, self._pending = self._pending, []
        for pending in done:
            self.pool.release(pending.source)
            if pending.checkpoint is not None:
                self.publish_checkpoints(pending.owner, [pending.checkpoint])

    def reset(self) -> None:
        """Forgets all that nobody uses. What was learned about checkpoints stays."""
        self.states.forget_unread()
        for queue in self.pool.order.idle:
            while (node := queue.first()) is not None:
                self.pool.evict(node)

    def pin(self, blocks: Mapping[int, Sequence[int]]) -> Pin:
        """Keeps findable blocks and states (ids by group) while a save reads them.

        Counts as a use of each, and of the blocks before it. Raises LookupError, and pins nothing,
        if one of them is free or private to a request.
        """
        ends: dict[TreeNode, int] = {}
        for group, ids in blocks.items():
            for block in ids:
                node = self.pool.find_node(group, block)
                is_state = group in self.plan.state_groups  # the states of all groups stay together
                end = node.end if is_state else node.start + node.blocks.index(block) + 1
                ends[node] = max(ends.get(node, 0), end)
        return tuple(self.pool.share(node, end) for node, end in ends.items())

    def unpin(self, pin: Pin) -> None:
        """The save has read what `pin` kept."""
        for node in reversed(pin):
            self.pool.release(node)

    def _leave_unloaded(
        self, tables: BlockTables, num_tokens: int, filled_from: Sequence[int]
    ) -> None:
        # A load fills in nothing that lies before a window; it must not be published.
        for group, table in tables.attention.items():
            table.leave(num_tokens, filled_from[group] if filled_from else 0)

    def _publish_all(self, tables: BlockTables, prefix: PrefixDigests, num_tokens: int) -> None:
        self.publish(tables, prefix, num_tokens)
        for table in tables.attention.values():
            if self._caches_prefixes:
                table.publish_partial(prefix, num_tokens)
