"""The longest prefix that all KV cache groups can start from: any number, order and mix of groups.

Each group says how many tokens, at most so many, it can resume after; asking in turn until nobody
shortens the prefix gives the longest length that all of them accept, whatever their order (the
fixed point of vLLM #31707). Tokens that an external source can fill count as cached here.
Reads only: nothing is referenced, moved or evicted.
"""

from collections.abc import Callable
from typing import NamedTuple

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.block_pool import BlockPool, Path
from engine.kv_cache.coverage import NOTHING, Coverage, Longest, longest_joint
from engine.kv_cache.full_attention import FullAttentionLookup, FullAttentionTable
from engine.kv_cache.mamba_states import MambaStates
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.sliding_window import SlidingWindowLookup, SlidingWindowTable
from engine.kv_cache.spec import (
    FullAttentionSpec,
    LatentAttentionSpec,
    LayerSpec,
    SlidingWindowSpec,
)
from engine.kv_cache.tables import GroupHit, GroupTable, Lookup


class AttentionKind(NamedTuple):
    """The lookup of groups with one type of spec, and the table of a request's blocks."""

    lookup: Callable[[BlockPool, PrefixDigests, int], Lookup]
    table: Callable[[BlockPool, int, GroupHit], GroupTable]


KINDS: dict[type[LayerSpec], AttentionKind] = {
    FullAttentionSpec: AttentionKind(FullAttentionLookup, FullAttentionTable),
    LatentAttentionSpec: AttentionKind(FullAttentionLookup, FullAttentionTable),
    SlidingWindowSpec: AttentionKind(SlidingWindowLookup, SlidingWindowTable),
}


class PrefixHit(NamedTuple):
    """The longest start that a request has.

    `num_tokens`: where it starts; every group is complete there once the external source has filled
    in what is not here. `local[g]`: how many of these tokens group g has here (attention groups:
    all the same number, whole joint blocks if the rest is loaded; Mamba groups: `num_tokens` if the
    checkpoint is here, else 0). `branch_point`: the length that local attention alone could start
    from. `attention[g]`, `states`: the local part of attention group g, and the checkpoint.
    """

    num_tokens: int
    branch_point: int
    attention: dict[int, GroupHit]
    states: GroupHit
    local: tuple[int, ...]

    @property
    def num_local(self) -> int:
        """Tokens at the start that are here in all attention groups: a load fills in the rest."""
        return min((self.local[group] for group in self.attention), default=self.num_tokens)

    @property
    def needs(self) -> list[Path]:
        """All that must be in use to start from this hit."""
        hits = (*self.attention.values(), self.states)
        return [path for hit in hits for path in hit.needs]


class Coordinator:
    """Looks prefixes up in the groups of one arena."""

    def __init__(self, pool: BlockPool, states: MambaStates) -> None:
        self._pool = pool
        self._states = states
        self._kinds = attention_kinds(pool.plan)

    def find(self, prefix: PrefixDigests, limit: int, external: Coverage) -> PrefixHit:
        """The longest joint hit of at most `limit` tokens, with what `external` can fill in.

        Where `external` has the states, Mamba groups do not shorten what attention hits (vLLM's
        per-request `skip_mamba_align`, #42524).
        """
        attention = {
            group: kind.lookup(self._pool, prefix, group) for group, kind in self._kinds.items()
        }
        local: list[Longest] = [lookup.longest for lookup in attention.values()]
        states = self._states.lookup(prefix)
        branch_point = longest_joint(limit, local)
        # A group accepts a length if it is complete there, here or by the external source.
        every: list[Longest] = [*local, states.longest]
        if external is not NOTHING:
            every = [_either(longest, external.attention) for longest in local]
            every.append(_either(states.longest, external.states))
        num_tokens = longest_joint(limit, every)
        num_local = longest_joint(num_tokens, local)
        has_states = states.longest(num_tokens) == num_tokens
        is_here = has_states and num_local == num_tokens
        if not is_here and external.attention(num_tokens) == num_tokens:
            # A load brings whole blocks, and some attention beside the states.
            size = self._pool.plan.joint_block_size
            num_local = longest_joint(num_tokens - 1, [*local, lambda most: most // size * size])
        in_group = [num_tokens if has_states else 0] * len(self._pool.plan.groups)
        for group in attention:
            in_group[group] = num_local
        return PrefixHit(
            num_tokens,
            branch_point,
            {group: lookup.hit(num_local) for group, lookup in attention.items()},
            states.hit(num_tokens) if has_states else GroupHit(),
            tuple(in_group),
        )


def attention_kinds(plan: ArenaPlan) -> dict[int, AttentionKind]:
    """The kind of every attention group of a plan; Mamba groups are `MambaStates`."""
    specs = enumerate(type(group.spec) for group in plan.groups)
    return {group: KINDS[spec] for group, spec in specs if spec in KINDS}


def _either(local: Longest, external: Longest) -> Longest:
    return lambda limit: max(local(limit), external(limit))
