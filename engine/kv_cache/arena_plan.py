"""Cuts an arena into units: a pure function from (groups, block size, memory) to sizes and waste.

A unit holds one Mamba state or several attention blocks (vLLM #21123 wanted this); blocks stay
small. Knows nothing of requests, and of memory only its size.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import gcd, lcm

from engine.errors import ConfigError
from engine.kv_cache.spec import STATE_ALIGNMENT, KVCacheGroup, MambaSpec, round_up

# Below this many blocks per unit the first-level lists, not the blocks, would dominate the
# bookkeeping.
MIN_BLOCKS_PER_UNIT = 16

# vLLM's block size, which consumers of events expect; larger blocks are hashed in such steps or,
# where it does not divide them, in the next smaller ones that do.
MAX_DEFAULT_HASH_BLOCK = 16


@dataclass(slots=True, frozen=True)
class ArenaPlan:
    """An arena of `num_units` equal units; `blocks_per_unit[g]` is 1 for a Mamba group.

    `hash_block_size`: tokens between two prefixes that have digests, and so the step of hits and
    events; divides the blocks of every attention group.
    """

    groups: tuple[KVCacheGroup, ...]
    block_size: int
    hash_block_size: int
    unit_bytes: int
    num_units: int
    blocks_per_unit: tuple[int, ...]

    @property
    def arena_bytes(self) -> int:
        """Bytes of the whole arena."""
        return self.unit_bytes * self.num_units

    @property
    def state_groups(self) -> tuple[int, ...]:
        """The Mamba groups. Their states come and go together, one unit of each per sequence."""
        specs = enumerate(group.spec for group in self.groups)
        return tuple(index for index, spec in specs if isinstance(spec, MambaSpec))

    @property
    def joint_block_size(self) -> int:
        """The smallest number of tokens at which blocks of all attention groups end."""
        return lcm(self.hash_block_size, *map(self.block_size_of, self.attention_groups))

    @property
    def attention_groups(self) -> tuple[int, ...]:
        """The groups that keep K and V of every token, or of those in a window."""
        return tuple(group for group in range(len(self.groups)) if group not in self.state_groups)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all attention groups."""
        sizes = ((self.block_bytes(group), group) for group in self.attention_groups)
        return sum(nbytes // self.block_size_of(group) for nbytes, group in sizes)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's states in all Mamba groups."""
        return sum(map(self.block_bytes, self.state_groups))

    def block_size_of(self, group: int) -> int:
        """Tokens per block of an attention group."""
        return self.groups[group].block_size or self.block_size

    def block_bytes(self, group: int) -> int:
        """Bytes of one block or state of `group`, without padding."""
        return self.groups[group].block_bytes(self.block_size)

    def block_offset(self, group: int, block: int) -> int:
        """Byte offset of a block (attention) or state (Mamba) in the arena."""
        unit, slot = divmod(block, self.blocks_per_unit[group])
        return unit * self.unit_bytes + slot * self.block_bytes(group)

    def waste(self, group: int) -> float:
        """Share of a full unit that `group` cannot use."""
        return 1.0 - self.blocks_per_unit[group] * self.block_bytes(group) / self.unit_bytes

    def blocks_for(self, group: int, num_tokens: int) -> int:
        """Blocks that `num_tokens` tokens need in `group`; a Mamba group needs one state."""
        if isinstance(self.groups[group].spec, MambaSpec):
            return 1
        return -(-num_tokens // self.block_size_of(group))

    def units_for(self, num_tokens: int, num_sequences: int = 1) -> int:
        """Units that so many sequences of `num_tokens` tokens need when they are alone."""
        return sum(
            -(-self.blocks_for(group, num_tokens) * num_sequences // per_unit)
            for group, per_unit in enumerate(self.blocks_per_unit)
        )

    def max_concurrency(self, num_tokens: int) -> int:
        """Sequences of `num_tokens` tokens that fit together when they share no prefix."""
        counts = range(1, self.num_units * max(self.blocks_per_unit) + 1)
        return bisect_right(counts, self.num_units, key=partial(self.units_for, num_tokens))

    def longest_sequence(self, upper: int) -> int:
        """Tokens, at most `upper`, of the longest sequence that fits alone; 0: not even one."""
        longer = range(1, upper + 1)
        return bisect_right(longer, self.num_units, key=self.units_for)


def plan_arena(
    groups: tuple[KVCacheGroup, ...],
    block_size: int,
    memory_bytes: int,
    *,
    hash_block_size: int | None = None,
) -> ArenaPlan:
    """The unit size that wastes least for these groups, and how many units `memory_bytes` holds.

    A unit is at least the largest state and a multiple of every tensor of a page (K or V of one
    layer's block), so that these can be addressed as rows of one array. `hash_block_size`: None for
    the largest one up to 16 that divides the blocks of every attention group. Raises ConfigError
    when not even two units fit, or for a hash block that does not divide them.
    """
    hash_tokens = _hash_block_size(groups, block_size, hash_block_size)
    is_state = [isinstance(group.spec, MambaSpec) for group in groups]
    sizes = [group.block_bytes(block_size) for group in groups]

    def of_units(unit_bytes: int) -> ArenaPlan:
        num_units, pairs = memory_bytes // unit_bytes, zip(sizes, is_state, strict=True)
        per_unit = tuple(1 if state else unit_bytes // size for size, state in pairs)
        return ArenaPlan(groups, block_size, hash_tokens, unit_bytes, num_units, per_unit)

    def worst_waste(plan: ArenaPlan) -> float:
        return max(map(plan.waste, range(len(groups))))

    tensors = (
        group.spec.tensor_bytes(group.block_size or block_size)
        for group in groups
        if not isinstance(group.spec, MambaSpec)
    )
    step = lcm(STATE_ALIGNMENT, *tensors)
    smallest = round_up(max(sizes), step)
    if any(is_state):
        # Up to one more of the largest block.
        candidates = {smallest, *(round_up(round_up(smallest, size), step) for size in sizes)}
        plan = min(map(of_units, sorted(candidates)), key=worst_waste)
    else:
        plan = of_units(round_up(smallest * MIN_BLOCKS_PER_UNIT, step))
    if plan.num_units < 2:
        raise ConfigError(
            f"kv_cache_memory_bytes={memory_bytes} holds {plan.num_units} units of "
            f"{plan.unit_bytes} bytes; give at least {2 * plan.unit_bytes}"
        )
    return plan


def _hash_block_size(groups: Sequence[KVCacheGroup], block_size: int, asked: int | None) -> int:
    """Raises ConfigError naming the size that does not fit, and the largest one that does."""
    sizes = [g.block_size or block_size for g in groups if not isinstance(g.spec, MambaSpec)]
    common = gcd(*sizes) or asked or block_size
    # A default that fits every block size: to refuse 24 would only make people look up its divisor.
    most = min(asked or MAX_DEFAULT_HASH_BLOCK, common)
    works = max(size for size in range(1, most + 1) if common % size == 0)
    if asked not in (None, works):
        unfit = next(size for size in sizes if size % asked)
        raise ConfigError(
            f"--hash-block-size {asked} does not divide attention blocks of {unfit} "
            f"tokens; --hash-block-size {works} does"
        )
    return works
