"""KV cache groups of published hybrid models, in Tandem's layout and in upstream's inflated one."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from engine.kv_cache.arena_plan import ArenaPlan, plan_arena
from engine.kv_cache.spec import FullAttentionSpec, KVCacheGroup, MambaSpec, StatePart, round_up

BLOCK_SIZE = 16


@dataclass(slots=True, frozen=True)
class Geometry:
    """K/V and states that one model's layers keep, in bfloat16 with float32 temporal states."""

    attention: FullAttentionSpec
    num_attention: int
    state: MambaSpec
    num_states: int

    @property
    def token_bytes(self) -> int:
        """K and V of one token in all layers."""
        return self.num_attention * self.attention.page_bytes(1)

    @property
    def state_bytes(self) -> int:
        """The whole state of one sequence."""
        return self.num_states * self.state.layer_bytes

    @property
    def inflated_block_size(self) -> int:
        """Tokens until one layer's attention page is as large as its Mamba state, as upstream."""
        return round_up(-(-self.state.layer_bytes // self.attention.page_bytes(1)), BLOCK_SIZE)

    def units(self, memory_bytes: int, block_size: int = BLOCK_SIZE) -> ArenaPlan:
        """Attention blocks of any size, hit at their ends only; one group per kind of layer."""
        split = self.num_states
        groups = (
            KVCacheGroup(self.state, tuple(range(split))),
            KVCacheGroup(self.attention, tuple(range(split, split + self.num_attention))),
        )
        return plan_arena(groups, block_size, memory_bytes, hash_block_size=block_size)

    def inflated(self, memory_bytes: int) -> ArenaPlan:
        """Upstream's layout: groups of equally many layers, every block and state one page each.

        Hits end at these large blocks, as there.
        """
        first, step = self.num_states, self.num_attention
        states = (range(start, min(start + step, first)) for start in range(0, first, step))
        groups = (
            *(KVCacheGroup(self.state, tuple(layers)) for layers in states),
            KVCacheGroup(self.attention, tuple(range(first, first + step))),
        )
        size = self.inflated_block_size
        return plan_arena(groups, size, memory_bytes, hash_block_size=size)


GEOMETRIES: Mapping[str, Geometry] = MappingProxyType(
    {
        "Qwen3.5-4B": Geometry(
            FullAttentionSpec(num_kv_heads=4, head_dim=256, dtype="bfloat16"),
            8,
            MambaSpec("gdn", (StatePart((3, 8192), "bfloat16"), StatePart((32, 128, 128)))),
            24,
        ),
        "Granite-4.0-H-Tiny": Geometry(
            FullAttentionSpec(num_kv_heads=4, head_dim=128, dtype="bfloat16"),
            4,
            MambaSpec("mamba2", (StatePart((3, 3328), "bfloat16"), StatePart((48, 64, 128)))),
            36,
        ),
    }
)
