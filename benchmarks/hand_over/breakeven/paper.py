"""The break-even on paper: published models, link speeds, and a node that computes so many FLOP/s.

Bytes per token and per state come from the engine's own planner, over the models' config.json.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Self

import msgspec

from benchmarks.support.model_folders import PUBLISHED_MODELS
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.spec import FullAttentionSpec

# Parameters that a token goes through, in units of 1e9; no config says it.
ACTIVE: Mapping[str, float] = MappingProxyType(
    {
        "Qwen3.5-4B": 4.0,
        "Nemotron-H-8B": 8.0,
        "Granite-4.0-H-Tiny": 1.0,
        "Falcon-H1-7B": 7.6,
        "Qwen3-8B": 8.2,
    }
)
BLOCK_SIZE = 16
ARENA_BYTES = 64 << 30
LONGEST = 1 << 20


class Heads(msgspec.Struct):
    """The part of a config.json that says how wide queries are."""

    num_attention_heads: int
    head_dim: int | None = None
    hidden_size: int = 0

    @property
    def query_width(self) -> int:
        """Channels of all query heads of one layer."""
        return self.num_attention_heads * (
            self.head_dim or self.hidden_size // self.num_attention_heads
        )


class Model(msgspec.Struct, frozen=True):
    """Numbers of a published model that decide when its prompts are worth a hand-over."""

    name: str
    token_bytes: int
    state_bytes: int
    active: float
    attention_layers: int
    query_width: int

    @classmethod
    def read(cls, name: str) -> Self:
        """Reads the model's config.json."""
        folder = PUBLISHED_MODELS / name
        plan = plan_arena(read_config(folder).groups, BLOCK_SIZE, ARENA_BYTES)
        heads = msgspec.json.decode((folder / "config.json").read_bytes(), type=Heads)
        attention = [len(g.layers) for g in plan.groups if isinstance(g.spec, FullAttentionSpec)]
        return cls(
            name,
            plan.kv_bytes_per_token,
            plan.state_bytes,
            1e9 * ACTIVE[name],
            sum(attention),
            heads.query_width,
        )

    def prefill_s(self, tokens: int, flops: float) -> float:
        """Seconds to compute a prompt at `flops` per second; causal attention grows by its square.

        2 operations per parameter and token, 2 per layer, query channel and pair of tokens.
        """
        pairs = self.attention_layers * self.query_width * tokens**2
        return 2 * (self.active * tokens + pairs) / flops

    def path_s(self, tokens: int, bytes_per_s: float, fixed_s: float) -> float:
        """Seconds to hand a prompt over."""
        return fixed_s + (self.state_bytes + self.token_bytes * tokens) / bytes_per_s

    def breakeven(self, bytes_per_s: float, *, fixed_s: float, flops: float) -> int | None:
        """The fewest tokens that are sooner handed over than computed; None up to `LONGEST`."""

        def pays(tokens: int) -> bool:
            return self.prefill_s(tokens, flops) >= self.path_s(tokens, bytes_per_s, fixed_s)

        if not pays(LONGEST):
            return None
        # prefill_s - path_s is convex and negative at 0, so it changes its sign once.
        low, high = 0, LONGEST
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle, high)
        return high
