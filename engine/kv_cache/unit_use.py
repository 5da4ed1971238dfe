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

    def num_units_with(self, group: int, *, more_units: set[int], more: int, new: int) -> int:
        """Units of a group if `more` of its blocks, in `more_units`, and `new` ones were in use."""
        units = len(self._used[group]) + len(more_units - self._used[group].keys())
        per_unit = self._per_unit[group]
        missing = self.num_used[group] + more + new - units * per_unit
        return units + max(0, -(-missing // per_unit))

    def pin(self, group: int, units: Units, num_blocks: int) -> list[int]:
        """Blocks come into use; returns the units of which nothing was."""
        used, fresh = self._used[group], []
        self.num_used[group] += num_blocks
        for unit, count in units.items():
            if unit in used:
                used[unit] += count
            else:
                used[unit] = count
                fresh.append(unit)
        return fresh

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
