"""Blocks and states with reference counts: in use, or idle and findable until their room is needed.

    free --allocate--> private --publish--> in a node, in use --release--> idle --evict--> free
                                                   ^------------ share ------'

Ends of a tree are evicted before their roots. A whole unit goes when that is what is missing, with
all that follows its blocks (two levels, as in Jenga, SOSP'25).
"""

from collections.abc import Callable, Iterable, Sequence
from operator import indexOf, itemgetter

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.eviction import EvictionOrder, IdleQueue
from engine.kv_cache.listener import Cached, CachedBlocks, CachedStates, CacheListener
from engine.kv_cache.prefix import PrefixDigests, PrefixKey
from engine.kv_cache.radix_tree import RadixTree, Rank, TreeNode, Units
from engine.kv_cache.unit_allocator import Allocated, NewBlocks, UnitAllocator

Path = tuple[TreeNode, int]  # the blocks of a node and all before it, up to this index


class BlockPool:
    """Owner of all blocks and states of one arena and of the trees that find them.

    `nodes_in[u]`: the nodes with blocks in unit u. `num_releases` grows with everything that is
    let go: while it stands still, no room has been freed. `on_states_evicted` is called with each
    checkpoint that gives way.
    """

    def __init__(self, plan: ArenaPlan, listener: CacheListener | None = None) -> None:
        self.plan = plan
        strides = dict.fromkeys(range(len(plan.groups)), 1)  # states end anywhere
        for group in plan.attention_groups:
            strides[group] = plan.block_size_of(group) // plan.hash_block_size
        self.trees = tuple(RadixTree(group, stride) for group, stride in strides.items())
        self.units = UnitAllocator(plan)
        self.order = EvictionOrder(len(plan.groups))
        self.nodes_in: dict[int, set[TreeNode]] = {}
        self.num_releases = 0
        self._state_group = plan.state_groups[0] if plan.state_groups else None
        state_queues = [self.order.idle[group] for group in plan.state_groups]
        self.idle_checkpoints = state_queues[0] if state_queues else IdleQueue()
        self._listener = listener
        self.on_states_evicted: Callable[[TreeNode], None] = lambda node: None

    def fits(self, new: NewBlocks, paths: Iterable[Path] = ()) -> bool:
        """True if new blocks fit while `paths` are in use as well; exact."""
        idle: dict[TreeNode, int] = {}  # how many blocks of it come into use
        for last, end in paths:
            node: TreeNode | None = last
            while node is not None and not node.refs:
                idle[node] = max(idle.get(node, 0), end - node.start)
                end, node = node.start, node.parent
        counts = {group: count for group, (count, _) in new.items()}
        units: dict[int, set[int]] = {}
        for node, count in idle.items():
            counts[node.group] = counts.get(node.group, 0) + count
            whole = count == len(node.blocks)
            first = node.units if whole else self.units.units_of(node.group, node.blocks[:count])
            units.setdefault(node.group, set()).update(first)
        needed = self.units.num_used_units
        for group, count in counts.items():
            needed += self.units.num_more_units(group, units.get(group, ()), count)
        return needed <= self.plan.num_units

    def allocate(self, new: NewBlocks) -> dict[int, Allocated] | None:
        """Private blocks by group, in use once; what is idle gives way.

        None, and nothing done, without room.
        """
        if not self.units.can_allocate(new):
            if not self.fits(new):
                return None
            while not self.units.can_allocate(new):
                self._evict_for(new)
        return {
            group: self.units.allocate(group, count, after) for group, (count, after) in new.items()
        }

    def free(self, group: int, blocks: Sequence[int]) -> None:
        """Frees private blocks."""
        if not blocks:
            return
        self.num_releases += 1
        idle_units = self.units.unuse(group, self.units.units_of(group, blocks))
        self.units.free(group, blocks)
        self.order.add_units([unit for unit in idle_units if unit in self.nodes_in])

    def add_node(self, group: int, start: int, blocks: list[int]) -> TreeNode:
        """Private blocks become a node with one user, freed with it unless made findable."""
        node = TreeNode(group, start, blocks)
        self._enter(node, self.units.units_of(group, blocks))
        return node

    def add_states(self, new: Allocated) -> TreeNode:
        """Private states, one per Mamba group, become a node, as `add_node`."""
        assert self._state_group is not None
        return TreeNode(self._state_group, 0, *new)

    def append(
        self, last: TreeNode, new: Allocated, digests: list[bytes], *, prefix: PrefixDigests
    ) -> TreeNode:
        """Private blocks, all complete, join the tree; moves a use from `last` to their node.

        `digests`: of the prefixes that end at each hash boundary in them.
        """
        start, (blocks, units) = last.end, new
        node = self.trees[last.group].append(last, blocks, digests)
        self._enter(node, units)
        if self._listener is not None:
            _announce(self._listener, self._cached_blocks(node, start - node.start), prefix)
        return node

    def add_partial(self, last: TreeNode, block: int) -> TreeNode:
        """A private block, partly filled, joins the tree, with one use more of it and of `last`."""
        last.refs += 1
        partial = self.trees[last.group].add_partial(last, block)
        self._enter(partial, self.units.units_of(last.group, [block]))
        return partial

    def complete(self, partial: TreeNode, digests: list[bytes], prefix: PrefixDigests) -> None:
        """The block of a partial node is whole; without a tree it becomes findable by itself."""
        num_known = len(partial.inner)
        self.trees[partial.group].complete(partial, digests)
        if self._listener is not None:
            _announce(self._listener, self._cached_blocks(partial, 0, num_known), prefix)

    def publish_partial(self, node: TreeNode, prefix: PrefixDigests, key: PrefixKey) -> None:
        """A node's one block, filled up to the end of `key`, becomes findable."""
        tree = self.trees[node.group]
        first = node.start * tree.stride + len(node.inner)  # the first hash block that is new
        new: list[bytes] = []
        if tree.stride > 1:
            new = prefix.boundaries()[first + 1 : key.num_tokens // prefix.hash_block_size + 1]
            tree.fill(node, new)
        if key.tail:
            tree.add_key(node, key)
        if self._listener is not None:
            size, tail = prefix.hash_block_size, key.digest if key.tail else None
            # Hash blocks of which the node holds nothing are not told.
            front = max(0, node.filled_from // size - first)
            start, digests, blocks = (first + front) * size, tuple(new[front:]), tuple(node.blocks)
            cached = CachedBlocks(
                node.group, start, key.num_tokens, digests, blocks, tail, node.filled_from
            )
            _announce(self._listener, cached, prefix)

    def publish_states(
        self, node: TreeNode, prefix: PrefixDigests, key: PrefixKey, *, value: float
    ) -> None:
        """States become findable, unless others of the prefix are; `value`: see `TreeNode`."""
        if self.trees[node.group].find(key) is None:
            self.trees[node.group].add_key(node, key)
            node.value = max(node.value, value)
            if self._listener is not None:
                _announce(self._listener, self._cached_key(node, key), prefix)

    def share(self, node: TreeNode, end: int) -> TreeNode:
        """One more use of a node up to index `end`; splits it there and returns the part before."""
        if end < node.end:
            # The user's part becomes the parent, so that those who use all of `node` still do.
            count, node = end - node.start, self.trees[node.group].split(node)
            (rest,) = node.children.values()
            self._move_front(rest, count)
        user: TreeNode | None = node
        while user is not None:
            user.refs += 1
            # A node in use counts as one user of its parent, however many users it has itself.
            if user.refs > 1:
                break
            self.order.remove(user)
            self.units.use(user.group, user.units)
            user = user.parent
        return node

    def follow(self, last: TreeNode, node: TreeNode, end: int) -> TreeNode:
        """Moves a use on from `last` to a node somewhere after it, up to index `end`."""
        # In place where nobody else sees the border between the two nodes: no split, no new node.
        if end < node.end and self.trees[node.group].may_move_end(last, node):
            self._move_front(node, end - node.start)
            return last
        node = self.share(node, end)
        self.release(last)
        return node

    def release(self, node: TreeNode) -> None:
        """One use less; the node, and those before it that nobody uses either, become idle."""
        user: TreeNode | None = node
        while user is not None:
            user.refs -= 1
            if user.refs:  # still in use, and so is its whole path
                break
            self.num_releases += 1
            idle_units = self.units.unuse(user.group, user.units)
            if not user.is_findable:
                self._free_blocks(user, 0)
            else:
                self.order.add(user)
                if user.group != self._state_group:
                    self.order.add_units(idle_units)
            user = user.parent

    def find_node(self, group: int, block: int) -> TreeNode:
        """The findable node with this block or state; raises LookupError without one."""
        nodes: Iterable[TreeNode] = self.nodes_in.get(block // self.plan.blocks_per_unit[group], ())
        if group in self.plan.state_groups:
            tails = self.trees[self.plan.state_groups[0]].partial.values()
            nodes = (node for by_tail in tails for node in by_tail.values())
        for node in nodes:
            if block in node.blocks and node.is_findable:
                return node
        raise LookupError(f"group {group}: block {block} is not cached")

    def _move_front(self, node: TreeNode, count: int) -> None:
        """The first `count` blocks of a node join the end of its parent."""
        parent, units = node.parent, self.units.units_of(node.group, node.blocks[:count])
        assert parent is not None
        self._enter(parent, units)
        self._leave(node, units)
        if parent.refs and not node.refs:  # idle blocks join a node in use
            self.units.use(node.group, units)
        self.trees[node.group].move_front(node, count)

    def _evict_for(self, new: NewBlocks) -> None:
        """One step towards room for new blocks: the least valuable idle thing that helps."""
        # For each short group its least idle node, cut to what is missing; or a checkpoint.
        options: list[tuple[Rank, TreeNode, int]] = []
        for group, (count, _) in new.items():
            missing = count - self.units.slots[group].num_free
            if group == self._state_group or missing <= 0:
                continue
            if (node := self.order.idle[group].first()) is not None:
                options.append((node.rank, node, max(0, len(node.blocks) - missing)))
        if (checkpoint := self.idle_checkpoints.first()) is not None:
            options.append((checkpoint.rank, checkpoint, 0))
        # Slots of a started unit help only their own group; a whole idle unit helps every group.
        units = self.order.units
        while units and not self._is_idle(next(iter(units))):
            units.popitem(last=False)
        best = min(options, key=itemgetter(0), default=None)
        unit, rank = next(iter(units.items()), (-1, None))
        if rank is None or (best is not None and best[0] <= rank):
            assert best is not None, "nothing idle is left, though there is room"
            self.evict(*best[1:])
            return
        for node in list(self.nodes_in[unit]):
            if unit in node.units:  # it may have gone with a node before it
                per_unit = self.plan.blocks_per_unit[node.group]
                self.evict(node, indexOf((block // per_unit for block in node.blocks), unit))

    def _is_idle(self, unit: int) -> bool:
        """True if a unit holds blocks and none of them is in use."""
        nodes = self.nodes_in.get(unit)
        return nodes is not None and unit not in self.units.used[next(iter(nodes)).group]

    def evict(self, node: TreeNode, keep: int = 0) -> None:
        """Frees all but the first `keep` blocks of an idle node, and first all that follows it."""
        # A block is findable only after all blocks before it, so what follows goes first.
        ends_first = [(child, 0) for child in reversed(node.descendants())]
        for gone, num_kept in [*ends_first, (node, keep)]:
            assert not gone.refs, f"group {gone.group}: {len(gone.blocks)} blocks are in use"
            if self._listener is not None:
                # Told while the node still says what goes.
                for cached in self._cached(gone, num_kept):
                    self._listener.removed(cached)
            self.order.advance(gone)
            if not num_kept:
                self.trees[gone.group].remove(gone)
                self.order.remove(gone)
            del gone.digests[num_kept * self.trees[gone.group].stride :]
            self._free_blocks(gone, num_kept)
            if gone.group == self._state_group:
                self.on_states_evicted(gone)

    def _free_blocks(self, node: TreeNode, keep: int) -> None:
        gone = node.blocks[keep:]
        del node.blocks[keep:]
        if node.group != self._state_group:
            self._leave(node, self.units.units_of(node.group, gone) if keep else dict(node.units))
        self.units.free(node.group, gone)

    def _enter(self, node: TreeNode, units: Units) -> None:
        """So many blocks in each of these units belong to a node from now on."""
        for unit, count in units.items():
            if unit in node.units:
                node.units[unit] += count
            else:
                node.units[unit] = count
                self.nodes_in.setdefault(unit, set()).add(node)

    def _leave(self, node: TreeNode, units: Units) -> None:
        for unit, count in units.items():
            node.units[unit] -= count
            if not node.units[unit]:
                del node.units[unit]
                self.nodes_in[unit].remove(node)
                if not self.nodes_in[unit]:
                    del self.nodes_in[unit]

    def _cached(self, node: TreeNode, keep: int) -> list[Cached]:
        """The findable blocks and states of a node after its first `keep` blocks."""
        cached = [self._cached_key(node, key) for key in node.keys]
        has_blocks = node.digests or node.inner
        return [*cached, self._cached_blocks(node, keep)] if has_blocks else cached

    def _cached_blocks(self, node: TreeNode, first: int, num_known: int = 0) -> CachedBlocks:
        """Blocks from index `first` of a node on, without the first `num_known` hash blocks."""
        stride, size = self.trees[node.group].stride, self.plan.hash_block_size
        digests = node.digests or node.inner
        start = node.start * stride
        # Hash blocks of which the node holds nothing were never told.
        num_known = max(first * stride + num_known, node.filled_from // size - start)
        return CachedBlocks(
            node.group,
            (start + num_known) * size,
            (start + len(digests)) * size,
            tuple(digests[num_known:]),
            tuple(node.blocks[first:]),
            filled_from=node.filled_from,
        )

    def _cached_key(self, node: TreeNode, key: PrefixKey) -> Cached:
        blocks = tuple(node.blocks)
        if node.group == self._state_group:
            return CachedStates(self.plan.state_groups, key.num_tokens, key.digest, blocks)
        start = key.num_tokens - len(key.tail)
        return CachedBlocks(
            node.group, start, key.num_tokens, (), blocks, key.digest, node.filled_from
        )


def _announce(listener: CacheListener, cached: Cached, prefix: PrefixDigests) -> None:
    """Content is findable. Its tokens are told from the last hash boundary before it on."""
    if isinstance(cached, CachedBlocks):
        start = cached.start
    else:
        start = (cached.end - 1) // prefix.hash_block_size * prefix.hash_block_size
    parent, tokens = prefix.digest_at(start), prefix.tokens(start, cached.end)
    listener.stored(cached, parent, tokens, cache_salt=prefix.cache_salt)
