"""Grouped-query attention without norms of q and k, whatever family it is in. Torch-free."""

from dataclasses import dataclass

from engine.kv_cache.spec import FullAttentionSpec
from engine.model_configs.base import ConfigReader
from engine.model_configs.checks import require_divisor
from engine.model_configs.rope import RopeConfig


@dataclass(slots=True, frozen=True, kw_only=True)
class AttentionConfig:
    """`bias` is for all four projections; `rope` None: no positional encoding.

    Scores are q k^T * `scale`. `input_scale` and `output_scale` multiply what goes in and comes
    out.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bias: bool
    scale: float
    rope: RopeConfig | None = None
    input_scale: float = 1.0
    output_scale: float = 1.0

    def spec(self, dtype: str) -> FullAttentionSpec:
        """What one such layer keeps per token."""
        return FullAttentionSpec(self.num_kv_heads, self.head_dim, dtype)


def read_attention(reader: ConfigReader) -> AttentionConfig:
    """Heads, sizes and bias under their common names; scores are scaled by head_dim^-0.5."""
    heads = reader.require("num_attention_heads", int)
    kv_heads = reader.get("num_key_value_heads", int, heads)
    require_divisor(reader, ("num_attention_heads", heads), ("num_key_value_heads", kv_heads))
    default = reader.require("hidden_size", int) // heads
    head_dim = reader.get("head_dim", int, reader.get("attention_head_dim", int, default))
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        bias=reader.get("attention_bias", bool, False),
        scale=head_dim**-0.5,
    )
