"""Typed views of the arena, one per layer; the only place where bytes become tensors.

Knows the plan and the arena, not who owns which unit.
"""

from math import prod

from torch import Tensor

from engine.forward import TORCH_DTYPES, AttentionCache, LayerCache, LayerCaches, StateCache
from engine.kv_cache.plan import ArenaPlan
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
    return plan.block_offset(group, block) // (_page_bytes(plan, group) // 2)


def _page_bytes(plan: ArenaPlan, group: int) -> int:
    spec = plan.groups[group].spec
    assert isinstance(spec, AttentionSpec)
    return spec.page_bytes(plan.block_size_of(group))


def _view(arena: Tensor, plan: ArenaPlan, group: int, *, place: int) -> LayerCache:
    spec = plan.groups[group].spec
    if isinstance(spec, MambaSpec):
        return _state_view(arena, plan, spec, place=place)
    return _attention_view(arena, plan.block_size_of(group), spec, place=place)


def _attention_view(
    arena: Tensor, block_size: int, spec: AttentionSpec, *, place: int
) -> AttentionCache:
    typed = arena.view(TORCH_DTYPES[spec.dtype])
    page = (spec.num_kv_heads, block_size, spec.head_dim)
    half = prod(page)
    k_pages, v_pages = (
        typed[(2 * place + half_index) * half :][
            : _whole(typed, half, 2 * place + half_index)
        ].view(-1, *page)
        for half_index in (0, 1)
    )
    return AttentionCache(
        k_pages, v_pages, k_pages.view(-1, spec.head_dim), v_pages.view(-1, spec.head_dim)
    )


def _whole(typed: Tensor, half: int, skipped: int) -> int:
    return (typed.numel() // half - skipped) * half


def _state_view(arena: Tensor, plan: ArenaPlan, spec: MambaSpec, *, place: int) -> StateCache:
    start = place * spec.layer_bytes
    conv = _strided(arena, plan, start, shape=spec.conv_shape, dtype=spec.conv_dtype)
    temporal = _strided(
        arena,
        plan,
        start + spec.conv_bytes,
        shape=spec.temporal_shape,
        dtype=spec.temporal_dtype,
    )
    return StateCache(conv, temporal)


def _strided(
    arena: Tensor, plan: ArenaPlan, start: int, *, shape: tuple[int, ...], dtype: str
) -> Tensor:
    size = DTYPE_BYTES[dtype]
    strides = [prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return arena.view(TORCH_DTYPES[dtype]).as_strided(
        (plan.num_units, *shape), (plan.unit_bytes // size, *strides), start // size
    )
