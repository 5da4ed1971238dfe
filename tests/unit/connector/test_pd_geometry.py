"""Properties that two nodes must share, and others that may differ; refusals name both values."""

from dataclasses import replace

import pytest

from connector.pd.wire.geometry import (
    PROTOCOL_VERSION,
    check_geometry,
    describe_geometry,
    geometry_of,
    groups_of,
)
from connector.pd.wire.messages import Handshake
from engine.errors import TransportError
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, LayerSpec, MambaSpec, StatePart

MODEL = {"attention.rope.theta": "10000.0", "layers": "gated_delta_net attention", "weights": "w"}
STATE = MambaSpec("gdn", (StatePart((3, 64)), StatePart((2, 16, 16))))
NARROW = replace(STATE, parts=(StatePart((3, 64)), StatePart((2, 16, 16), "bfloat16")))
SHORT = replace(STATE, parts=(StatePart((2, 64)), StatePart((2, 16, 16))))
FULL = FullAttentionSpec(num_kv_heads=2, head_dim=4, dtype="float32")


def node(
    name: str, *groups: KVCacheGroup, block_size: int = 16, other: dict[str, str] | None = None
) -> Handshake:
    plan = plan_arena(groups, block_size, 1 << 20)
    geometry = describe_geometry(plan, MODEL, prefix_hash_seed="") | (other or {})
    return Handshake(
        engine_id=name,
        transport="shm",
        transport_address=b"",
        geometry=geometry,
        lease_s=30.0,
    )


def usual(
    name: str,
    *,
    state: LayerSpec = STATE,
    full: LayerSpec = FULL,
    other: dict[str, str] | None = None,
) -> Handshake:
    return node(name, KVCacheGroup(state, (0, 2)), KVCacheGroup(full, (1, 3)), other=other)


def theirs_with(name: str, value: str) -> Handshake:
    """A peer whose model differs in one field."""
    return usual("d", other={f"model.{name}": value})


def test_block_sizes_units_and_groups_may_differ() -> None:
    other = node(
        "d",
        KVCacheGroup(FULL, (3,), 48),
        *(KVCacheGroup(STATE, (0,)), KVCacheGroup(FULL, (1,)), KVCacheGroup(STATE, (2,))),
        block_size=32,
    )
    check_geometry(usual("p"), other)
    assert [group.block_size for group in groups_of(other)] == [48, 32, 32, 32]
    plan = plan_arena((KVCacheGroup(FULL, (1,)),), 16, 1 << 20)
    assert groups_of(node("x", KVCacheGroup(FULL, (1,)))) == geometry_of(plan)


@pytest.mark.parametrize(
    ("theirs", "here", "there"),
    [
        (usual("d", full=replace(FULL, dtype="bfloat16")), "float32", "bfloat16"),
        (usual("d", full=replace(FULL, num_kv_heads=1)), "kv_heads=2", "kv_heads=1"),
        (usual("d", state=NARROW), "float32", "bfloat16"),
        (usual("d", state=SHORT), "3x64", "2x64"),
        (node("d", KVCacheGroup(STATE, (0, 2))), "head_dim=4", "absent"),
        (usual("d", other={"protocol": "1"}), f"'{PROTOCOL_VERSION}'", "'1'"),
        (theirs_with("attention.rope.theta", "100.0"), "theta is '10000.0'", "'100.0'"),
        (theirs_with("layers", "gated_delta_net mamba2"), "layer 1 is 'attention'", "'mamba2'"),
        (theirs_with("layers", "gated_delta_net attention -"), "layer 2 is 'absent'", "'-'"),
        (theirs_with("new", "x" * 5000), "model.new is 'absent'", f"'{'x' * 200}' there"),
    ],
)
def test_a_difference_is_refused_with_both_values(theirs: Handshake, here: str, there: str) -> None:
    with pytest.raises(TransportError) as refused:
        check_geometry(usual("p"), theirs)
    before, _, after = str(refused.value).partition(" here and ")
    assert here in before and there in after


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        '{"spec":"a","layers":[],"block_size":16}',
        '{"spec":"a","layers":[-1],"block_size":1}',
        '{"spec":"a","layers":[1],"block_size":0}',
        '{"spec":1,"layers":[1],"block_size":16}',
    ],
)
def test_a_peer_that_describes_nonsense_is_refused(text: str) -> None:
    groups = KVCacheGroup(STATE, (0, 2)), KVCacheGroup(FULL, (1, 3))
    with pytest.raises(TransportError, match="describes no KV cache group"):
        check_geometry(usual("p"), node("d", *groups, other={"kv_cache_group.1": text}))


def test_a_difference_of_protocols_comes_first() -> None:
    other = usual("d", other={"protocol": "1", "model.attention.rope.theta": "1.0"})
    with pytest.raises(TransportError, match="protocol is"):
        check_geometry(usual("p"), other)


def test_a_gap_in_the_list_of_groups_is_refused() -> None:
    with pytest.raises(TransportError, match="lists its KV cache groups"):
        groups_of(node("d", KVCacheGroup(FULL, (1,)), other={"kv_cache_group.7": "{}"}))
