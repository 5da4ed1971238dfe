"""From block tables to byte spans: what is joined, what is skipped, what is refused."""

import pytest

from connector.pd.layout import plan_pull
from connector.transports.base import SpanPair
from engine.errors import TransportError
from engine.kv_cache.plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, MambaSpec, form_groups

MAMBA = MambaSpec("gdn", (3, 64), "float32", (2, 16, 16))
ATTENTION = FullAttentionSpec(num_kv_heads=1, head_dim=4, dtype="float32")
PLAN = plan_arena(form_groups(((MAMBA,), (ATTENTION,))), 16, 1 << 20)
STATE, PAGES = (
    next(g for g, group in enumerate(PLAN.groups) if isinstance(group.spec, kind))
    for kind in (MambaSpec, FullAttentionSpec)
)
BLOCK = PLAN.block_bytes(PAGES)
assert PLAN.blocks_per_unit[PAGES] > 3


def tables(state: tuple[int, ...], pages: tuple[int, ...]) -> list[tuple[int, ...]]:
    """In the order of the plan's groups."""
    return [state, pages] if STATE < PAGES else [pages, state]


def test_neighbours_on_both_sides_become_one_span_and_local_blocks_stay() -> None:
    remote = tables((5000,), (0, 7000, 7000 + BLOCK, 90_000))
    plan = plan_pull(PLAN, tables((3,), (0, 1, 2, 3)), remote, num_tokens=64, num_local_tokens=16)
    assert set(plan.spans) == {
        SpanPair(5000, PLAN.block_offset(STATE, 3), PLAN.block_bytes(STATE)),
        SpanPair(7000, PLAN.block_offset(PAGES, 1), 2 * BLOCK),
        SpanPair(90_000, PLAN.block_offset(PAGES, 3), BLOCK),
    }
    assert (plan.attention_bytes, plan.state_bytes) == (3 * BLOCK, PLAN.block_bytes(STATE))


@pytest.mark.parametrize(
    "remote",
    [
        tables((0,), (0,)),
        tables((0,), (0, BLOCK, 2 * BLOCK)),
        tables((), (0, BLOCK)),
        tables((0,), (0, BLOCK))[:1],
        [*tables((0,), (0, BLOCK)), (0,)],
        [],
    ],
)
def test_other_blocks_or_groups_than_reserved_are_refused(remote: list[tuple[int, ...]]) -> None:
    with pytest.raises(TransportError, match="announced"):
        plan_pull(PLAN, tables((3,), (0, 1)), remote, num_tokens=32, num_local_tokens=0)
