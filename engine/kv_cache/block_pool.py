"""Blocks and states with reference counts: in use, or idle and findable until their room is needed.

    free  --allocate-->  in use  --release-->  idle (if published) --evict-->  free
                            ^------- share -------'

Eviction is GreedyDual (Young 1991): an idle block ranks at the clock plus what it saves per byte,
and the clock moves up to the rank of what goes; so recency and value both count. A whole unit goes
when that is what is missing, the least valuable one first (two levels, as in Jenga, SOSP'25).
"""

import heapq
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix_index import PrefixIndex, PrefixKey
from engine.kv_cache.spec import MambaSpec
from engine.kv_cache.unit_allocator import UnitAllocator

Rank = tuple[float, int]


@dataclass(slots=True, eq=False)
class Block:
    """One block or state. `worth`: tokens saved per byte; `rank`: its place while idle."""

    refs: int = 1
    keys: list[PrefixKey] = field(default_factory=list)
    worth: float = 0.0
    rank: Rank = (0.0, 0)


class BlockPool:
    """Owner of all units of one arena and of the index of what they hold."""

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self.index = PrefixIndex()
        self._allocator = UnitAllocator(plan)
        self._is_state = tuple(isinstance(group.spec, MambaSpec) for group in plan.groups)
        self._blocks: tuple[dict[int, Block], ...] = tuple({} for _ in plan.groups)
        self._pins: tuple[Counter[int], ...] = tuple(Counter() for _ in plan.groups)
        self._idle_blocks: tuple[dict[int, Rank], ...] = tuple({} for _ in plan.groups)
        self._idle_units: list[tuple[Rank, int, int]] = []
        self._unit_ranks: dict[int, Rank] = {}
        self._num_refs = [0] * len(plan.groups)
        self._num_idle_states = 0
        self._clock = 0.0
        self._releases = 0

    @property
    def num_free_units(self) -> int:
        """Units that hold nothing, not even something idle."""
        return self._allocator.num_free_units

    @property
    def num_idle_units(self) -> int:
        """Units of which nothing is in use: free ones, and those that hold idle content only."""
        return self.plan.num_units - sum(map(len, self._pins))

    @property
    def num_states(self) -> int:
        """Mamba states in use."""
        return sum(
            refs for refs, is_state in zip(self._num_refs, self._is_state, strict=True) if is_state
        )

    @property
    def num_idle_states(self) -> int:
        """Checkpoints that nobody uses at the moment."""
        return self._num_idle_states

    def fits(self, counts: Sequence[int], shared: Iterable[tuple[int, int]] = ()) -> bool:
        """Whether `counts[g]` new blocks of every group fit while `shared` blocks stay; exact."""
        pins = [len(pinned) for pinned in self._pins]
        refs = list(self._num_refs)
        newly: set[tuple[int, int]] = set()
        for group, block in shared:
            if self._blocks[group][block].refs == 0:
                refs[group] += 1
                unit = block // self.plan.blocks_per_unit[group]
                if unit not in self._pins[group]:
                    newly.add((group, unit))
        for group, _ in newly:
            pins[group] += 1
        units = 0
        for group, count in enumerate(counts):
            per_unit = self.plan.blocks_per_unit[group]
            missing = max(0, count - (pins[group] * per_unit - refs[group]))
            units += -(-missing // per_unit)
        return units <= self.plan.num_units - sum(pins)

    def allocate(
        self, counts: Sequence[int], after: Sequence[int | None]
    ) -> tuple[list[int], ...] | None:
        """`counts[g]` new blocks per group, in use once; None, and nothing done, without room.

        `after[g]`: the request's last block, whose right neighbour is taken first.
        """
        if not self.fits(counts):
            return None
        while not self._allocator.can_allocate(counts):
            self._evict_for(counts)
        return tuple(
            self._take(group, *wanted)
            for group, wanted in enumerate(zip(counts, after, strict=True))
        )

    def share(self, group: int, block: int) -> None:
        """One more user of a block in use or idle."""
        entry = self._blocks[group][block]
        if entry.refs == 0:
            self._pin(group, block)
            self._wake(group, block)
        entry.refs += 1

    def release(self, group: int, blocks: Iterable[int]) -> None:
        """One user less of each; given last first, ends are evicted before roots."""
        for block in blocks:
            entry = self._blocks[group][block]
            entry.refs -= 1
            if entry.refs == 0:
                self._rest(group, block, entry)
                self._unpin(group, block)

    def publish(self, group: int, block: int, key: PrefixKey, *, worth: float) -> bool:
        """Makes a complete block findable. False when the same prefix is published already."""
        if not self.index.add(group, key, block):
            return False
        entry = self._blocks[group][block]
        entry.keys.append(key)
        entry.worth = max(entry.worth, worth)
        return True

    def drop_idle_state(self) -> None:
        """Evicts the least valuable idle checkpoint, if there is one."""
        states = [entry for entry in self._idle_units if self._is_state[entry[1]]]
        least = min(filter(lambda entry: self._is_current(*entry), states), default=None)
        if least is not None:
            self._evict_unit(*least[1:])

    def clear(self) -> None:
        """Evicts everything idle."""
        for group, blocks in enumerate(self._blocks):
            for block in [block for block, entry in blocks.items() if entry.refs == 0]:
                self._evict(group, block)

    def check(self, used: Sequence[Counter[int]]) -> None:
        """Recounts against `used[g]`, users per block; raises AssertionError on any difference."""
        for group, blocks in enumerate(self._blocks):
            refs = Counter({block: entry.refs for block, entry in blocks.items() if entry.refs})
            assert refs == used[group], f"group {group}: {refs} counted, {used[group]} used"
            self._check_group(group, blocks)
        self._allocator.check([list(blocks) for blocks in self._blocks])
        assert len(self.index) == sum(
            len(e.keys) for blocks in self._blocks for e in blocks.values()
        )

    def _check_group(self, group: int, blocks: dict[int, Block]) -> None:
        per_unit = self.plan.blocks_per_unit[group]
        in_use = [block for block, entry in blocks.items() if entry.refs]
        assert self._pins[group] == Counter(block // per_unit for block in in_use)
        assert self._num_refs[group] == len(in_use)
        for block, entry in blocks.items():
            assert entry.refs or entry.keys, f"group {group}: block {block} is idle and unfindable"
            assert all(self.index.find(group, key.digest) == block for key in entry.keys)
        if self._is_state[group]:
            idle = len(blocks) - len(in_use)
            states = [
                e for g, bs in enumerate(self._blocks) if self._is_state[g] for e in bs.values()
            ]
            assert self._num_idle_states == sum(e.refs == 0 for e in states) >= idle

    def _take(self, group: int, count: int, after: int | None) -> list[int]:
        blocks = self._allocator.allocate(group, count, after) if count else []
        for block in blocks:
            self._blocks[group][block] = Block()
            self._pin(group, block)
        return blocks

    def _pin(self, group: int, block: int) -> None:
        unit = block // self.plan.blocks_per_unit[group]
        self._num_refs[group] += 1
        self._pins[group][unit] += 1
        self._unit_ranks.pop(unit, None)

    def _unpin(self, group: int, block: int) -> None:
        """The last one out offers the unit to eviction, at the rank of its most valuable block."""
        unit = block // self.plan.blocks_per_unit[group]
        self._num_refs[group] -= 1
        self._pins[group][unit] -= 1
        if self._pins[group][unit]:
            return
        del self._pins[group][unit]
        ranks = [self._blocks[group][idle].rank for idle in self._blocks_of(group, unit)]
        if ranks:
            self._offer_unit(group, unit, max(ranks))

    def _rest(self, group: int, block: int, entry: Block) -> None:
        """Puts a block that nobody uses where eviction finds it, or frees it at once."""
        if not entry.keys:
            self._drop(group, block)
            return
        self._releases += 1
        entry.rank = (self._clock + entry.worth, self._releases)
        self._num_idle_states += self._is_state[group]
        if not self._is_state[group]:  # all worth the same, so the order of arrival is that of rank
            self._idle_blocks[group][block] = entry.rank

    def _wake(self, group: int, block: int) -> None:
        self._num_idle_states -= self._is_state[group]
        self._idle_blocks[group].pop(block, None)

    def _drop(self, group: int, block: int) -> None:
        del self._blocks[group][block]
        self._allocator.free(group, [block])

    def _evict(self, group: int, block: int) -> None:
        entry = self._blocks[group][block]
        assert entry.refs == 0, f"group {group}: block {block} is in use"
        for key in entry.keys:
            self.index.remove(group, key)
        self._clock = max(self._clock, entry.rank[0])
        self._wake(group, block)
        self._drop(group, block)

    def _evict_for(self, counts: Sequence[int]) -> None:
        """One step towards room for `counts`: the least valuable idle block or unit that helps."""
        oldest = [
            (next(iter(idle.values())), group)
            for group, idle in enumerate(self._idle_blocks)
            if idle and self._lacks_slots(group, counts[group])
        ]
        unit = self._least_unit()
        if unit is not None and (not oldest or unit[0] <= min(oldest)[0]):
            self._evict_unit(*unit[1:])
            return
        group = min(oldest)[1]
        self._evict(group, next(iter(self._idle_blocks[group])))

    def _lacks_slots(self, group: int, count: int) -> bool:
        return not self._is_state[group] and self._allocator.num_free_slots(group) < count

    def _least_unit(self) -> tuple[Rank, int, int] | None:
        """(rank, group, unit) of the least valuable unit of which nothing is in use."""
        heap = self._idle_units
        while heap and not self._is_current(*heap[0]):
            heapq.heappop(heap)
        return heap[0] if heap else None

    def _is_current(self, rank: Rank, group: int, unit: int) -> bool:
        return self._unit_ranks.get(unit) == rank and bool(self._blocks_of(group, unit))

    def _offer_unit(self, group: int, unit: int, rank: Rank) -> None:
        self._unit_ranks[unit] = rank
        heapq.heappush(self._idle_units, (rank, group, unit))
        if len(self._idle_units) > 4 * self.plan.num_units:  # most of them have been used again
            self._idle_units = [entry for entry in self._idle_units if self._is_current(*entry)]
            heapq.heapify(self._idle_units)

    def _blocks_of(self, group: int, unit: int) -> list[int]:
        per_unit = self.plan.blocks_per_unit[group]
        blocks = range(unit * per_unit, (unit + 1) * per_unit)
        return [block for block in blocks if block in self._blocks[group]]

    def _evict_unit(self, group: int, unit: int) -> None:
        for block in self._blocks_of(group, unit):
            self._evict(group, block)
