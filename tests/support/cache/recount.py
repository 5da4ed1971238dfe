"""Recounts a scheduler and its cache from scratch and compares, and empties a cache."""

from collections import Counter
from collections.abc import Iterable, Sequence

from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.checkpoints import CheckpointPolicy
from engine.kv_cache.manager import KVCacheManager, Pin
from engine.kv_cache.radix_tree import RadixTree, TreeNode
from engine.kv_cache.tables import BlockTables
from engine.sched.scheduler import Scheduler


def check_scheduler(scheduler: Scheduler) -> None:
    """Compares, between two steps, the cache with those whom the scheduler gave blocks."""
    held, loading = scheduler.holds.values(), (load.request for load in scheduler.loads.values())
    owners = [*scheduler._running, *held, *loading]
    tables = [request.blocks for request in owners if request.blocks is not None]
    assert len(tables) == len(owners)
    assert len(scheduler._requests) == scheduler.num_running + scheduler.num_waiting
    check_cache(scheduler.cache, tables, scheduler._saving.values())


def check_cache(
    cache: KVCacheManager, tables: Iterable[BlockTables] = (), pins: Iterable[Pin] = ()
) -> None:
    """Compares every unit, block, reference and digest of a cache with its users, which are all.

    Call while no checkpoint is reserved for a step.
    """
    users = Counter(pending.source for pending in cache._pending)
    users.update(p.checkpoint.node for p in cache._pending if p.checkpoint is not None)
    users.update(node for pin in pins for node in pin)
    private: list[list[int]] = [[] for _ in cache.plan.groups]
    for own in tables:
        users.update([own.state] if own.state else ())
        for group, table in own.attention.items():
            nodes, blocks = table.held()
            users.update(nodes)
            private[group] += blocks
    _check_pool(cache.pool, users, private)


def evict_all(cache: KVCacheManager) -> None:
    """Evicts everything that nobody uses, and forgets what that seems to say about checkpoints."""
    cache.reset()
    cache.states.policy = CheckpointPolicy()


def _check_pool(
    pool: BlockPool, users: Counter[TreeNode], private: Sequence[Sequence[int]]
) -> None:
    """Compares a pool with its users per node and private blocks per group."""
    roots = {tree.root for tree in pool.trees}
    nodes = set(users).union(*pool.nodes_in.values(), *(q.members for q in pool.order.idle)) - roots
    for node in nodes:
        _check_node(pool, node, users[node])
    # Every unit belongs to one group, and every block to one owner: a request or one node.
    units: set[int] = set()
    for group, tree in enumerate(pool.trees):
        mine = {node for node in nodes if node.group == group}
        assert _num_findable(tree) == sum(bool(node.digests) + len(node.keys) for node in mine)
        num_inside = sum(len(node.inner or node.digests[: tree.stride - 1]) for node in mine)
        assert sum(map(len, tree.inside.values())) == num_inside
        assert tree.root.refs == 1 + users[tree.root] + _num_used(tree.root)
        _check_idle(pool, group, {node for node in mine if not node.refs})
        used = [*private[group], *(b for node in mine if node.refs for b in node.blocks)]
        owned = [*private[group], *(b for node in mine for b in node.blocks)]
        started = _check_units(pool, group, owned=owned, used=used)
        assert not units & started, f"group {group} shares units {units & started}"
        units |= started
    free = {unit for unit in range(pool.plan.num_units) if pool.units.free_units >> unit & 1}
    assert free == set(range(pool.plan.num_units)) - units, "free units are miscounted"
    assert len(free) == pool.units.num_free_units


def _check_node(pool: BlockPool, node: TreeNode, num_users: int) -> None:
    assert node.refs == num_users + _num_used(node)
    assert node.refs or node.is_findable, "a node is idle and cannot be found"
    assert node.units == _units_of(node.blocks, pool.plan.blocks_per_unit[node.group])
    is_state = node.group in pool.plan.state_groups
    assert is_state or all(node in pool.nodes_in[unit] for unit in node.units)
    tree = pool.trees[node.group]
    assert all(tree.find(key) is node for key in node.keys)
    assert not (node.inner and node.digests) and len(node.inner) < tree.stride
    inside = node.inner or node.digests[: tree.stride - 1]
    assert all(node in tree.inside[digest] for digest in inside)
    num_whole = len(node.digests) / tree.stride
    is_single = node.keys or node.inner
    assert num_whole in ((0, 1) if is_single else (0, len(node.blocks)))
    assert len(node.blocks) == 1 or is_state or not is_single
    for key, child in node.children.items():
        assert child.parent is node and child.start == node.end
        assert key == (child.digests[tree.stride - 1] if child.digests else child)
        assert node.refs or node.rank > child.rank, "a root would be evicted before its end"
        assert num_whole == len(node.blocks), "something follows a block that is not whole"
    if node.parent is not None:
        assert node in node.parent.children.values()
    elif node.digests:
        assert tree.whole[node.digests[-1]] is node


def _num_used(node: TreeNode) -> int:
    return sum(child.refs > 0 for child in node.children.values())


def _num_findable(tree: RadixTree) -> int:
    """Findable nodes of a tree or a window, and partial keys."""
    in_tree = sum(bool(node.digests) for node in tree.root.descendants())
    return in_tree + len(tree.whole) + sum(map(len, tree.partial.values()))


def _check_idle(pool: BlockPool, group: int, idle: set[TreeNode]) -> None:
    assert idle == pool.order.idle[group].members
    if group not in pool.plan.state_groups:
        units = {unit for node in idle for unit in node.units}
        assert units - pool.units.used[group].keys() <= pool.order.units.keys()


def _check_units(
    pool: BlockPool, group: int, *, owned: Sequence[int], used: Sequence[int]
) -> set[int]:
    """The units of a group, after a look at its slots and uses."""
    units, slots, per_unit = pool.units, pool.units.slots[group], pool.plan.blocks_per_unit[group]
    assert len(set(owned)) == len(owned), f"group {group}: a block has two owners"
    assert units.used[group] == _units_of(used, per_unit), f"group {group}: uses are miscounted"
    assert units.num_used[group] == len(used)
    free = {block // per_unit: (1 << per_unit) - 1 for block in owned}
    for block in owned:
        free[block // per_unit] &= ~(1 << block % per_unit)
    assert slots.num_free == sum(map(int.bit_count, free.values()))
    partly_free = {unit: bits for unit, bits in free.items() if bits}
    assert slots.free_bits == partly_free, f"group {group}: slots are miscounted"
    return set(free)


def _units_of(blocks: Sequence[int], per_unit: int) -> dict[int, int]:
    return dict(Counter(block // per_unit for block in blocks))
