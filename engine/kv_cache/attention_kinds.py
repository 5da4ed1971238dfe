"""The kinds of attention group: one row each. Mamba groups are `mamba_states`."""

from collections.abc import Callable
from dataclasses import dataclass

from engine.kv_cache.attention_group import GroupHit, GroupTable, Lookup
from engine.kv_cache.block_pool import BlockPool
from engine.kv_cache.full_attention import FullAttentionLookup, FullAttentionTable
from engine.kv_cache.plan import ArenaPlan
from engine.kv_cache.prefix import PrefixDigests
from engine.kv_cache.sliding_window import SlidingWindowLookup, SlidingWindowTable
from engine.kv_cache.spec import FullAttentionSpec, LayerSpec, SlidingWindowSpec


@dataclass(slots=True, frozen=True)
class AttentionKind:
    """How groups with one type of spec are looked up, and how their blocks are booked."""

    lookup: Callable[[BlockPool, PrefixDigests, int], Lookup]
    table: Callable[[BlockPool, int, GroupHit], GroupTable]


KINDS: dict[type[LayerSpec], AttentionKind] = {
    FullAttentionSpec: AttentionKind(FullAttentionLookup, FullAttentionTable),
    SlidingWindowSpec: AttentionKind(SlidingWindowLookup, SlidingWindowTable),
}


def attention_kinds(plan: ArenaPlan) -> dict[int, AttentionKind]:
    """The kind of every attention group of a plan."""
    specs = enumerate(type(group.spec) for group in plan.groups)
    return {group: KINDS[spec] for group, spec in specs if spec in KINDS}
