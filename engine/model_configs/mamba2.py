"""Sizes and switches of a Mamba2 mixer, whatever family it is in. Torch-free."""

from dataclasses import dataclass

from engine.errors import CheckpointError
from engine.kv_cache.spec import MambaSpec
from engine.model_configs.base import ConfigReader


@dataclass(slots=True, frozen=True, kw_only=True)
class Mamba2Config:
    """One mixer: `num_heads` heads of `head_dim` channels; each of `n_groups` has its B and C.

    `time_step_limit` clamps dt after softplus. `proj_bias` is for in_proj and out_proj.
    """

    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    time_step_limit: tuple[float, float]

    @property
    def inner_size(self) -> int:
        """Channels of x, of the gate z and of the output."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    def spec(self, conv_dtype: str, temporal_dtype: str) -> MambaSpec:
        """What one such layer keeps for one sequence."""
        return MambaSpec(
            kind="mamba2",
            conv_shape=(self.conv_kernel - 1, self.conv_dim),
            conv_dtype=conv_dtype,
            temporal_shape=(self.num_heads, self.head_dim, self.state_size),
            temporal_dtype=temporal_dtype,
        )


def read_time_step_limit(reader: ConfigReader, key: str) -> tuple[float, float]:
    """`key` as (low, high), by default (0, infinity).

    Infinity is the bare word `Infinity` in hub files and `{"__float__": "Infinity"}` in files that
    transformers 5 saved.
    """
    limits = [_number(value) for value in reader.get(key, list, [0.0, float("inf")])]
    if len(limits) != 2 or limits[0] is None or limits[1] is None:
        raise CheckpointError(
            f"{reader.source}: {key!r} is {reader.fields[key]!r}, expected two numbers"
        )
    return limits[0], limits[1]


def _number(value: object) -> float | None:
    if isinstance(value, dict):
        value = value.get("__float__")
    if value in ("Infinity", "inf"):
        return float("inf")
    return float(value) if isinstance(value, int | float) else None
