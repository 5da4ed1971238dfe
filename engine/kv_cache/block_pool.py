"""Blocks and states with reference counts: in use, or idle and findable until their room is needed.

    free --allocate--> private --publish--> in a run, in use --release--> idle --evict--> free
                                                  ^------------ share ------'

Ends of runs are evicted before their roots. A whole unit goes when that is what is missing, with
all that follows its blocks (two levels, as in Jenga, SOSP'25). The states of all Mamba groups count
under the first of them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from operator import itemgetter

from engine.kv_cache.eviction import EvictionOrder
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix_index import PrefixIndex
from engine.kv_cache.run import PartialKey, Rank, Run, Units
from engine.kv_cache.slots import units_of
from engine.kv_cache.unit_allocator import UnitAllocator, Wants
from engine.kv_cache.unit_use import UnitUse

Share = tuple[Run, int]  # a run that is to be used up to this place


class BlockPool:
    """Owner of all units of one arena and of the indexes of what they hold."""

    def __init__(self, plan: ArenaPlan) -> None:
        self.plan = plan
        self.indexes = tuple(PrefixIndex(group) for group in range(len(plan.groups)))
        self.num_releases = 0
        self._allocator = UnitAllocator(plan)
        self._use = UnitUse(plan)
        self._order = EvictionOrder(len(plan.groups))
        self._runs_in: dict[int, set[Run]] = {}
        self._state_group = plan.state_groups[0] if plan.state_groups else None

    @property
    def num_free_units(self) -> int:
        """Units that hold nothing, not even something idle."""
        return self._allocator.num_free_units

    @property
    def num_idle_units(self) -> int:
        """Units of which nothing is in use: free ones, and those that hold idle content only."""
        return self.plan.num_units - self._use.num_units

    @property
    def num_idle_checkpoints(self) -> int:
        """Checkpoints that nobody uses at the moment."""
        return len(self._order.checkpoints)

    def num_used(self, group: int) -> int:
        """Blocks or states of this group in use."""
        return self._use.num_used[group]

    def has_room(self, wants: Wants) -> bool:
        """Whether new blocks fit beside all that is in use or idle."""
        return self._allocator.can_allocate(wants)

    def fits(self, wants: Wants, shares: Iterable[Share] = ()) -> bool:
        """Whether new blocks fit while `shares` are in use as well; exact."""
        waking = self._waking(shares)
        needed = self._use.num_units
        for group in wants.keys() | waking.keys():
            units, more = waking.get(group, (set(), 0))
            new, _ = wants.get(group, (0, None))
            needed += self._use.num_more_units(group, units=units, more=more, new=new)
        return needed <= self.plan.num_units

    def allocate(self, wants: Wants) -> dict[int, tuple[list[int], Units]] | None:
        """New private blocks by group, with their units, in use once; what is idle gives way.

        None, and nothing done, without room.
        """
        if not self._allocator.can_allocate(wants):
            if not self.fits(wants):
                return None
            self._make_room(wants)
        new = {}
        for group, (count, after) in wants.items():
            new[group] = self._allocator.allocate(group, count, after)
            self._use.pin(group, new[group][1], count)
        return new

    def drop(self, group: int, blocks: Sequence[int]) -> None:
        """Frees private blocks."""
        self.num_releases += 1
        idle_units = self._use.unpin(group, self._units(group, blocks), len(blocks))
        self._allocator.free(group, blocks)
        for unit in idle_units:
            if unit in self._runs_in:
                self._order.add_unit(unit)

    def form_run(self, group: int, start: int, blocks: list[int]) -> Run:
        """Private blocks become a run with one user, freed with it unless made findable."""
        run = Run(group, start, blocks)
        self._enter(run, self._units(group, blocks))
        return run

    def form_states(self, states: list[int], units: Units) -> Run:
        """Private states become those of one sequence or checkpoint, as `form_run`."""
        assert self._state_group is not None
        return Run(self._state_group, 0, states, units)

    def append(
        self, tip: Run, blocks: list[int], digests: list[bytes], *, units: Units | None
    ) -> Run:
        """Private blocks, all complete, join the tree; moves a use from `tip` to their run.

        `units`: theirs, where the caller knows them.
        """
        run = tip
        if not tip.can_grow:
            run = Run(tip.group, tip.end, [], parent=tip)
            tip.children[digests[0]] = run
        run.blocks += blocks
        run.digests += digests
        self._enter(run, self._units(tip.group, blocks) if units is None else units)
        return run

    def add_leaf(self, tip: Run, block: int) -> Run:
        """A private block becomes a leaf behind `tip`, with one use more of both."""
        leaf = self.form_run(tip.group, tip.end, [block])
        leaf.parent = tip
        tip.leaves.add(leaf)
        tip.refs += 1
        return leaf

    def complete_leaf(self, leaf: Run, digest: bytes) -> None:
        """A leaf has become a whole block."""
        assert leaf.parent is not None
        leaf.parent.leaves.remove(leaf)
        leaf.parent.children[digest] = leaf
        leaf.digests.append(digest)

    def publish(self, run: Run, digest: bytes) -> None:
        """The one block of a run outside of trees, complete, becomes findable."""
        run.digests.append(digest)
        self.indexes[run.group].whole[digest] = run

    def publish_partial(self, run: Run, key: PartialKey, *, worth: float = 1.0) -> bool:
        """What a run holds up to `key` becomes findable. False when something else is already."""
        if not self.indexes[run.group].add(key, run):
            return False
        run.partial_keys.append(key)
        run.worth = max(run.worth, worth)
        return True

    def share(self, run: Run, end: int) -> Run:
        """One more use of a run up to place `end`; splits it there and returns the part before."""
        if end < run.end:
            run = self._split(run, end - run.start)
        user: Run | None = run
        while user is not None:
            user.refs += 1
            if user.refs > 1:
                break
            self._wake(user)
            user = user.parent
        return run

    def follow(self, tip: Run, run: Run, end: int) -> Run:
        """Moves a use on from `tip` to a run somewhere behind it, up to place `end`."""
        if tip.ends_for(run) and end < run.end:
            self._move_front(run, tip, end - run.start)
            return tip
        run = self.share(run, end)
        self.release(tip)
        return run

    def release(self, run: Run) -> None:
        """One use less; the run, and those before it that nobody uses either, become idle."""
        user: Run | None = run
        while user is not None:
            user.refs -= 1
            if user.refs:
                break
            self._rest(user)
            user = user.parent

    def drop_idle_checkpoint(self) -> None:
        """Evicts the least valuable idle checkpoint, if there is one."""
        least = self._order.checkpoints.least()
        if least is not None:
            self._evict(least, 0)

    def clear(self) -> None:
        """Evicts everything idle."""
        for group in range(len(self.plan.groups)):
            while (run := self._order.first_of(group)) is not None:
                self._evict(run, 0)
        while self._order.checkpoints:
            self.drop_idle_checkpoint()

    def check(self, users: Counter[Run], private: Sequence[Sequence[int]]) -> None:
        """Recounts against uses per run and private blocks per group; raises AssertionError."""
        runs = set(users).union(*self._runs_in.values(), self._order.checkpoints)
        runs -= {index.root for index in self.indexes}
        for run in runs:
            self._check_run(run, users[run])
        owned = [[*blocks] for blocks in private]
        for run in runs:
            owned[run.group] += run.blocks
        self._allocator.check(owned)
        for group, index in enumerate(self.indexes):
            mine = [run for run in runs if run.group == group]
            assert len(index) == sum(len(run.digests) + len(run.partial_keys) for run in mine)
            used = [*private[group], *(block for run in mine if run.refs for block in run.blocks)]
            used_units = self._units(group, used)
            self._use.check(group, used_units)
            self._check_idle(group, {run for run in mine if not run.refs}, used_units)
            assert index.root.refs == 1 + users[index.root] + sum(
                run.refs > 0 for run in index.root.following
            )

    def _check_run(self, run: Run, users: int) -> None:
        assert run.refs == users + sum(child.refs > 0 for child in run.following)
        assert run.refs or run.is_findable, "a run is idle and unfindable"
        assert run.units == self._units(run.group, run.blocks)
        is_state = run.group == self._state_group
        assert is_state or all(run in self._runs_in[unit] for unit in run.units)
        assert all(self.indexes[run.group].find(key) is run for key in run.partial_keys)
        assert len(run.digests) in ((0, 1) if run.partial_keys else (0, len(run.blocks)))
        for child in run.following:
            assert child.parent is run and child.start == run.end
            assert run.refs or run.rank > child.rank, "a root would be evicted before its end"
            assert len(run.digests) == len(run.blocks), "something follows what is not whole"
        assert run.parent is None or run in run.parent.following

    def _check_idle(self, group: int, idle: set[Run], used_units: Units) -> None:
        if group == self._state_group:
            assert idle == set(self._order.checkpoints)
            return
        units = {unit for run in idle for unit in run.units} - used_units.keys()
        self._order.check(group, idle, units)

    def _waking(self, shares: Iterable[Share]) -> dict[int, tuple[set[int], int]]:
        """By group: the units and the number of idle blocks that would come into use."""
        counts: dict[int, dict[Run, int]] = {}
        for share, end in shares:
            run: Run | None = share
            while run is not None and run.refs == 0:
                waking = counts.setdefault(run.group, {})
                waking[run] = max(waking.get(run, 0), end - run.start)
                end = run.start
                run = run.parent
        return {
            group: (
                {unit for run, count in waking.items() for unit in self._units_of(run, count)},
                sum(waking.values()),
            )
            for group, waking in counts.items()
        }

    def _units_of(self, run: Run, count: int) -> Iterable[int]:
        """Units of a run's first `count` blocks."""
        whole = count == len(run.blocks)
        return run.units if whole else self._units(run.group, run.blocks[:count])

    def _units(self, group: int, blocks: Sequence[int]) -> Units:
        if group == self._state_group:
            return dict.fromkeys(blocks, 1)
        return units_of(blocks, self.plan.blocks_per_unit[group])

    def _split(self, run: Run, count: int) -> Run:
        """The first `count` blocks become a run of their own, in front of the rest."""
        assert run.parent is not None
        first = run.digests[0]
        head = Run(run.group, run.start, [], parent=run.parent, children={first: run})
        head.refs, head.rank, head.worth = int(run.refs > 0), run.rank, run.worth
        run.parent.children[first] = head
        run.parent = head
        self._move_front(run, head, count)
        return head

    def _move_front(self, run: Run, target: Run, count: int) -> None:
        """The first `count` blocks of a run join the end of the run before it."""
        units = self._units(run.group, run.blocks[:count])
        self._enter(target, units)
        self._leave(run, units)
        if target.refs and not run.refs:
            self._use.pin(run.group, units, count)
        del target.children[run.digests[0]]
        target.blocks += run.blocks[:count]
        target.digests += run.digests[:count]
        del run.blocks[:count], run.digests[:count]
        run.start += count
        target.children[run.digests[0]] = run

    def _wake(self, run: Run) -> None:
        self._leave_order(run)
        self._use.pin(run.group, run.units, len(run.blocks))

    def _leave_order(self, run: Run) -> None:
        if run.group == self._state_group:
            self._order.checkpoints.discard(run)
        else:
            self._order.remove_blocks(run)

    def _rest(self, run: Run) -> None:
        """Puts a run that nobody uses where eviction finds it, or frees it at once."""
        self.num_releases += 1
        idle_units = self._use.unpin(run.group, run.units, len(run.blocks))
        if not run.is_findable:
            self._forget(run, 0)
        elif run.group == self._state_group:
            self._order.add_checkpoint(run)
        else:
            self._order.add_blocks(run, idle_units)

    def _make_room(self, wants: Wants) -> None:
        while not self._allocator.can_allocate(wants):
            self._evict_for(wants)

    def _evict_for(self, wants: Wants) -> None:
        """One step towards room for new blocks: the least valuable idle thing that helps."""
        options: list[tuple[Rank, Run, int]] = []
        for group, (count, _) in wants.items():
            missing = self._allocator.num_missing_slots(group, count)
            if missing > 0 and (run := self._order.first_of(group)) is not None:
                options.append((run.rank, run, max(0, len(run.blocks) - missing)))
        if (checkpoint := self._order.checkpoints.least()) is not None:
            options.append((checkpoint.rank, checkpoint, 0))
        unit = self._order.first_unit_before([rank for rank, _, _ in options], self._is_idle)
        if unit is None:
            _, run, keep = min(options, key=itemgetter(0))
            self._evict(run, keep)
        else:
            self._evict_unit(unit)

    def _is_idle(self, unit: int) -> bool:
        """Whether a unit holds something, of which nothing is in use."""
        return unit in self._runs_in and not self._use.is_used(unit)

    def _evict_unit(self, unit: int) -> None:
        for run in list(self._runs_in[unit]):
            if unit in run.units:  # it may have gone with a run before it
                per_unit = self.plan.blocks_per_unit[run.group]
                places = enumerate(run.blocks)
                self._evict(run, next(at for at, block in places if block // per_unit == unit))

    def _evict(self, run: Run, keep: int) -> None:
        """Frees all but the first `keep` blocks of an idle run, and first all that follows it."""
        following = run.following
        for child in following:
            following += child.following
        for child in reversed(following):
            self._evict_end(child, 0)
        self._evict_end(run, keep)

    def _evict_end(self, run: Run, keep: int) -> None:
        assert run.refs == 0, f"group {run.group}: {len(run.blocks)} blocks are in use"
        self._order.note_evicted(run)
        if not keep:
            self.indexes[run.group].forget(run)
            self._leave_order(run)
        del run.digests[keep:]
        self._forget(run, keep)

    def _forget(self, run: Run, keep: int) -> None:
        gone = run.blocks[keep:]
        del run.blocks[keep:]
        if run.group != self._state_group:
            self._leave(run, self._units(run.group, gone))
        self._allocator.free(run.group, gone)

    def _enter(self, run: Run, units: Units) -> None:
        for unit, count in units.items():
            if unit in run.units:
                run.units[unit] += count
            else:
                run.units[unit] = count
                self._runs_in.setdefault(unit, set()).add(run)

    def _leave(self, run: Run, units: Units) -> None:
        for unit, count in units.items():
            run.units[unit] -= count
            if not run.units[unit]:
                del run.units[unit]
                self._runs_in[unit].remove(run)
                if not self._runs_in[unit]:
                    del self._runs_in[unit]
