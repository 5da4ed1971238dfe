"""Sizes of a gated delta net mixer. Torch-free."""

from dataclasses import dataclass

from engine.kv_cache.spec import MambaSpec
from engine.model_configs.config_reader import ConfigReader


@dataclass(slots=True, frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """One mixer; consecutive value heads share a key head."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int

    @property
    def keys(self) -> int:
        """Channels of all keys (and of all queries)."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Channels of all values (and of the gate)."""
        return self.value_heads * self.value_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution: queries, keys, values."""
        return 2 * self.keys + self.values

    def spec(self, dtype: str) -> MambaSpec:
        """The cache contents of one such layer for one sequence."""
        return MambaSpec(
            kind="gated_delta_net",
            conv_shape=(self.conv_kernel - 1, self.conv_dim),
            conv_dtype=dtype,
            temporal_shape=(self.value_heads, self.key_dim, self.value_dim),
        )


def read_gated_delta_net(reader: ConfigReader) -> GatedDeltaNetConfig:
    """Reads Qwen3.5's `linear_*` fields. Raises CheckpointError for heads that do not fit."""
    config = GatedDeltaNetConfig(
        key_heads=reader.require("linear_num_key_heads", int),
        value_heads=reader.require("linear_num_value_heads", int),
        key_dim=reader.require("linear_key_head_dim", int),
        value_dim=reader.require("linear_value_head_dim", int),
        conv_kernel=reader.get("linear_conv_kernel_dim", int, 4),
    )
    values = ("linear_num_value_heads", config.value_heads)
    reader.require_divisor(values, ("linear_num_key_heads", config.key_heads))
    return config
