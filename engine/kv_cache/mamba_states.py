"""Mamba states: one set per running request, and checkpoints, which are sets that are findable.

A set has the state of every Mamba group after the same tokens, one unit each; it is shared, kept
and evicted as a whole. Idle checkpoints have a budget of units.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.checkpoints import CheckpointPolicy, Reason, value_per_token
from engine.kv_cache.prefix import PrefixDigests, PrefixKey
from engine.kv_cache.radix_tree import RadixTree, TreeNode
from engine.kv_cache.tables import BlockTables, GroupHit, Lookup
from engine.kv_cache.unit_allocator import Allocated, NewBlocks


@dataclass(slots=True, eq=False)
class Checkpoint:
    """Room for the states of all Mamba `groups` after the tokens of `key`, of the `prefix`."""

    prefix: PrefixDigests
    key: PrefixKey
    groups: tuple[int, ...]
    node: TreeNode

    @property
    def num_tokens(self) -> int:
        """The position: tokens that the states have seen."""
        return self.key.num_tokens

    @property
    def states(self) -> dict[int, int]:
        """The worker writes the state of Mamba group g into `states[g]`."""
        return dict(zip(self.groups, self.node.blocks, strict=True))


class StateLookup(Lookup):
    """Can resume where a checkpoint stands; the empty prefix needs none.

    Without a tree there are no Mamba groups, and any length will do.
    """

    def __init__(self, tree: RadixTree | None, prefix: PrefixDigests) -> None:
        self._tree = tree
        self._prefix = prefix
        self._searched = -1  # up to here `_found` is the longest
        self._found: tuple[int, TreeNode] | None = None

    def longest(self, limit: int) -> int:
        if self._tree is None:
            return limit
        found = self._find(limit)
        return 0 if found is None else found[0]

    def hit(self, num_tokens: int) -> GroupHit:
        found = self._find(num_tokens)
        return GroupHit() if found is None else GroupHit(source=(found[1], found[1].end))

    def _find(self, limit: int) -> tuple[int, TreeNode] | None:
        if self._tree is None or not self._tree.partial:
            return None
        position = 0 if self._found is None else self._found[0]
        # The last answer holds for every limit between the position found and the limit searched.
        if not position <= limit <= self._searched:
            self._searched = limit
            self._found = self._tree.longest_partial(self._prefix, 0, limit)
        return self._found


class MambaStates:
    """All Mamba groups of one arena, which may be none.

    `max_idle_units`: what idle checkpoints may fill. `one_set`: the room that one set needs.
    `policy` hears which checkpoints are found.
    """

    def __init__(self, pool: BlockPool, *, max_idle_units: int) -> None:
        self.groups = pool.plan.state_groups
        self.one_set: NewBlocks = {group: (len(self.groups), None) for group in self.groups[:1]}
        self.policy = CheckpointPolicy()
        self._unread: dict[
            TreeNode, tuple[Reason, int]
        ] = {}  # and the tokens that a hit would save
        pool.on_states_evicted = self._on_evicted
        self._value_per_token = value_per_token(pool.plan)
        self._pool = pool
        self._tree = pool.trees[self.groups[0]] if self.groups else None
        self._max_idle = max_idle_units // max(1, len(self.groups))
        self._num_reserved = 0
        self._new: list[TreeNode] = []

    @property
    def num_used(self) -> int:
        """States in use, of requests and of checkpoints."""
        return self._pool.units.num_used[self.groups[0]] if self.groups else 0

    @property
    def num_idle(self) -> int:
        """States of checkpoints that nobody uses."""
        return len(self._pool.idle_checkpoints.members) * len(self.groups)

    def lookup(self, prefix: PrefixDigests) -> StateLookup:
        """Starts the lookup of one prefix."""
        return StateLookup(self._tree, prefix)

    def begin(self, new: dict[int, Allocated], *, is_new: bool) -> TreeNode | None:
        """The states of a request, in use once; new ones have to be zeroed."""
        if not self.groups:
            return None
        node = self._pool.add_states(new[self.groups[0]])
        if is_new:
            self._new.append(node)
        return node

    def take_new(self) -> tuple[tuple[int, int], ...]:
        """(group, state) that start from nothing, each once; the worker zeroes them before use."""
        if not self._new:
            return ()
        new, self._new = self._new, []
        return tuple(state for node in new for state in zip(self.groups, node.blocks, strict=True))

    def reserve(self, prefix: PrefixDigests, num_tokens: int) -> Checkpoint | None:
        """Room for the states after `num_tokens` tokens; None if kept already, or without room.

        What is reserved at once has the budget of idle ones, whatever requests ask for.
        """
        key = prefix.key(num_tokens)
        if self._tree is None or self._tree.find(key) is not None:
            return None
        if self._num_reserved >= max(1, self._max_idle):
            return None
        self.trim()
        new = self._pool.allocate(self.one_set)
        if new is None:
            return None
        self._num_reserved += 1
        return Checkpoint(prefix, key, self.groups, self._pool.add_states(new[self.groups[0]]))

    def found(self, node: TreeNode) -> None:
        """A request starts from this checkpoint."""
        if (kept := self._unread.pop(node, None)) is not None:
            self.policy.found(*kept)

    def publish(
        self,
        tables: BlockTables,
        node: TreeNode,
        prefix: PrefixDigests,
        *,
        key: PrefixKey,
        reason: Reason | None,
    ) -> None:
        """Complete states become a checkpoint, of value for the tokens since the one before it."""
        saved = max(0, key.num_tokens - tables.num_checkpointed)
        tables.num_checkpointed = key.num_tokens
        self._pool.publish_states(node, prefix, key, value=saved * self._value_per_token)
        if reason is not None and node.is_findable:
            self._unread[node] = reason, key.num_tokens - tables.num_hit

    def drop(self, checkpoints: Sequence[Checkpoint]) -> None:
        """Gives reserved rooms back; what is published stays as long as nobody needs its room."""
        self._num_reserved -= len(checkpoints)
        for checkpoint in checkpoints:
            self._pool.release(checkpoint.node)

    def free(self, node: TreeNode | None) -> None:
        """A request needs its states no longer."""
        if node is not None:
            # Freed before its first step: nothing is left to zero.
            self._new = [new for new in self._new if new is not node]
            self._pool.release(node)
            self.trim()

    def _on_evicted(self, node: TreeNode) -> None:
        if (kept := self._unread.pop(node, None)) is not None:
            self.policy.evicted_unread(kept[0])

    def forget_unread(self) -> None:
        """States evicted from now on count as read: their loss says nothing about the policy."""
        self._unread.clear()

    def trim(self) -> None:
        """Evicts idle checkpoints over the budget."""
        idle = self._pool.idle_checkpoints
        while len(idle.members) > self._max_idle and (least := idle.first()) is not None:
            self._pool.evict(least)
