"""Typed views of the arena, one per layer; the only place where bytes become tensors.

Knows the plan and the arena, but not the owners of units.
"""

from math import prod

from torch import Tensor

from engine.forward import TORCH_DTYPES, AttentionCache, LayerCache, LayerCaches, StateCache
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import DTYPE_BYTES, AttentionSpec, MambaSpec


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
    return plan.block_offset(group, block) // (spec.page_bytes(plan.block_size_of(group)) // 2)


def _view(arena: Tensor, plan: ArenaPlan, group: int, *, place: int) -> LayerCache:
    """The cache of the layer that is number `place` in its group."""
    spec = plan.groups[group].spec
    if isinstance(spec, MambaSpec):
        start = place * spec.layer_bytes
        conv = _states(arena, plan, start, shape=spec.conv_shape, dtype=spec.conv_dtype)
        start += spec.conv_bytes
        shape, dtype = spec.temporal_shape, spec.temporal_dtype
        return StateCache(conv, _states(arena, plan, start, shape=shape, dtype=dtype))
    # The arena as rows of half a page. The view of a layer starts where its K (or V) is in the
    # first block, so a block has the same row number in the views of all layers:
    #
    #   block of two layers    | K of 0 | V of 0 | K of 1 | V of 1 |
    #   row r of its views       k: r     v: r+1   k: r+2   v: r+3
    page = (spec.num_kv_heads, plan.block_size_of(group), spec.head_dim)
    rows = arena.view(TORCH_DTYPES[spec.dtype])
    rows = rows[: rows.numel() // prod(page) * prod(page)].view(-1, *page)
    k, v = rows[2 * place :], rows[2 * place + 1 :]
    return AttentionCache(k, v, k.view(-1, spec.head_dim), v.view(-1, spec.head_dim))


def _states(
    arena: Tensor, plan: ArenaPlan, start: int, *, shape: tuple[int, ...], dtype: str
) -> Tensor:
    """[units, *shape]: one tensor of a layer's state, `start` bytes into each unit."""
    size = DTYPE_BYTES[dtype]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return arena.view(TORCH_DTYPES[dtype]).as_strided(
        (plan.num_units, *shape), (plan.unit_bytes // size, *strides), start // size
    )
