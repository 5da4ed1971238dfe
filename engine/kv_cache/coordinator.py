"""The longest prefix that all KV cache groups can start from: any number, order and mix of groups.

Each group says how many tokens, at most so many, it can resume after; asking in turn until nobody
shortens any more gives the longest length that all of them accept, whatever their order (the fixed
point of vLLM #31707). Reads only: nothing is referenced, moved or evicted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.kv_cache.attention_group import GroupHit, Lookup
from engine.kv_cache.attention_kinds import attention_kinds
from engine.kv_cache.block_pool import BlockPool, Share
from engine.kv_cache.mamba_states import MambaStates
from engine.kv_cache.prefix import PrefixDigests


@dataclass(slots=True, frozen=True)
class PrefixHit:
    """What a request can start from.

    `attention[g]`: the part of attention group g. `states`: the checkpoint, if Mamba groups take
    part. `junction`: the length that attention alone could start from.
    """

    num_tokens: int
    junction: int
    attention: dict[int, GroupHit]
    states: GroupHit

    @property
    def needs(self) -> list[Share]:
        """All runs that must be in use to start from this hit."""
        hits = (*self.attention.values(), self.states)
        return [share for hit in hits for share in hit.needs]


class Aligned(Lookup):
    """Can resume after any multiple of so many tokens."""

    def __init__(self, multiple: int) -> None:
        self._multiple = multiple

    def longest(self, limit: int) -> int:
        return limit // self._multiple * self._multiple

    def hit(self, num_tokens: int) -> GroupHit:
        return GroupHit()


class Coordinator:
    """Looks prefixes up in the groups of one arena."""

    def __init__(self, pool: BlockPool, states: MambaStates | None) -> None:
        self._pool = pool
        self._states = states
        self._attention = attention_kinds(pool.plan)
        self._whole_blocks = Aligned(pool.plan.joint_block_size)

    def find(self, prefix: PrefixDigests, limit: int, *, skip_mamba: bool) -> PrefixHit:
        """The longest joint hit of at most `limit` tokens.

        `skip_mamba` (vLLM #42524): Mamba groups neither constrain nor join it, because their states
        come from elsewhere; with them comes what is missing of attention, in whole blocks.
        """
        attention = {
            group: kind.lookup(self._pool, prefix, group) for group, kind in self._attention.items()
        }
        junction = _longest(limit, [*attention.values()])
        states = self._whole_blocks if skip_mamba else self._state_lookup(prefix)
        num_tokens = _longest(junction, [*attention.values(), states])
        hits = {group: lookup.hit(num_tokens) for group, lookup in attention.items()}
        return PrefixHit(num_tokens, junction, hits, states.hit(num_tokens))

    def _state_lookup(self, prefix: PrefixDigests) -> Lookup:
        return Aligned(1) if self._states is None else self._states.lookup(prefix)


def _longest(limit: int, lookups: Sequence[Lookup]) -> int:
    while True:
        shortest = limit
        for lookup in lookups:
            shortest = lookup.longest(shortest)
        if shortest == limit:
            return limit
        limit = shortest
