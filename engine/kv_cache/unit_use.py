"""How many blocks or states of each unit are in use. Knows no runs and no order of eviction."""

from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.run import Units


class UnitUse:
    """Counts uses per unit; a unit of which nothing is in use may be given to anybody.

    `num_used[g]`: blocks of group g in use (the states of all Mamba groups: under the first).
    """

    def __init__(self, plan: ArenaPlan) -> None:
        self.num_used = [0] * len(plan.groups)
        self._per_unit = plan.blocks_per_unit
        self._used: tuple[Units, ...] = tuple({} for _ in plan.groups)

    @property
    def num_units(self) -> int:
        """Units of which something is in use."""
        return sum(map(len, self._used))

    def num_more_units(self, group: int, *, units: set[int], more: int, new: int) -> int:
        """How many more units a group needs for `more` of its blocks, in `units`, and new ones."""
        fresh = len(units - self._used[group].keys()) if units else 0
        per_unit = self._per_unit[group]
        room = (len(self._used[group]) + fresh) * per_unit - self.num_used[group] - more
        return fresh + max(0, -((room - new) // per_unit))

    def is_used(self, unit: int) -> bool:
        """Whether anything in a unit is in use."""
        return any(unit in used for used in self._used)

    def pin(self, group: int, units: Units, num_blocks: int) -> None:
        """Blocks come into use."""
        used = self._used[group]
        self.num_used[group] += num_blocks
        for unit, count in units.items():
            if unit in used:
                used[unit] += count
            else:
                used[unit] = count

    def unpin(self, group: int, units: Units, num_blocks: int) -> list[int]:
        """Blocks are not in use any more; returns the units of which nothing is."""
        used, idle = self._used[group], []
        self.num_used[group] -= num_blocks
        for unit, count in units.items():
            left = used[unit] - count
            if left:
                used[unit] = left
            else:
                del used[unit]
                idle.append(unit)
        return idle

    def check(self, group: int, units: Units) -> None:
        """Recounts one group; raises AssertionError."""
        assert self._used[group] == units, f"group {group}: uses are miscounted"
        assert self.num_used[group] == sum(units.values())
