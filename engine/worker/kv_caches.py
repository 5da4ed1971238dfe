"""Typed views of the arena, one per layer; the only place where bytes become tensors.

Knows the plan and the arena, but not the owners of units.
"""

from itertools import accumulate
from math import prod

from torch import Tensor

from engine.forward import TORCH_DTYPES, AttentionCache, LayerCache, LayerCaches, StateCache
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import DTYPE_BYTES, AttentionSpec, MambaSpec, StatePart


def layer_caches(arena: Tensor, plan: ArenaPlan) -> LayerCaches:
    """Views of every layer's cache over uint8 `arena` [plan.arena_bytes]."""
    caches: LayerCaches = {}
    for group_id, group in enumerate(plan.groups):
        for place, layer in enumerate(group.layers):
            caches[group_id, layer] = _view(arena, plan, group_id, place=place)
    return caches


def page_row(plan: ArenaPlan, group: int, block: int) -> int:
    """Row of `block` in `AttentionCache.k_pages` of every layer of attention group `group`."""
    spec = plan.groups[group].spec
    assert isinstance(spec, AttentionSpec)
    return plan.block_offset(group, block) // spec.tensor_bytes(plan.block_size_of(group))


def _view(arena: Tensor, plan: ArenaPlan, group: int, *, place: int) -> LayerCache:
    """The cache of the layer that is number `place` in its group."""
    spec = plan.groups[group].spec
    if isinstance(spec, MambaSpec):
        ends = accumulate((part.nbytes for part in spec.parts), initial=place * spec.layer_bytes)
        starts = zip(ends, spec.parts, strict=False)  # the last one is the layer's own end
        return StateCache(tuple(_states(arena, plan, start, part=part) for start, part in starts))
    # The arena as rows of one tensor of a page. The view of a layer starts where its K (or V) is in
    # the first block, so a block has the same row number in the views of all layers:
    #
    #   block of two layers    | K of 0 | V of 0 | K of 1 | V of 1 |
    #   row r of its views       k: r     v: r+1   k: r+2   v: r+3
    #
    # A latent is K and V at once: one tensor a page, so both are the same view.
    page = (spec.num_kv_heads, plan.block_size_of(group), spec.head_dim)
    rows = arena.view(TORCH_DTYPES[spec.dtype])
    rows = rows[: rows.numel() // prod(page) * prod(page)].view(-1, *page)
    first = spec.tensors * place
    k = rows[first:]
    v = k if spec.tensors == 1 else rows[first + 1 :]
    return AttentionCache(k, v, k.view(-1, spec.head_dim), v.view(-1, spec.head_dim))


def _states(arena: Tensor, plan: ArenaPlan, start: int, *, part: StatePart) -> Tensor:
    """[units, *part.shape]: one tensor of a layer's state, `start` bytes into each unit."""
    size = DTYPE_BYTES[part.dtype]
    strides = [prod(part.shape[axis + 1 :]) for axis in range(len(part.shape))]
    return arena.view(TORCH_DTYPES[part.dtype]).as_strided(
        (plan.num_units, *part.shape), (plan.unit_bytes // size, *strides), start // size
    )
