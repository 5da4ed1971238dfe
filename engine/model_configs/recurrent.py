"""Settings of the mixers that keep a state, of whatever tensors it is. Torch-free."""

from dataclasses import dataclass
from enum import StrEnum

from engine.errors import CheckpointError
from engine.kv_cache.spec import DTYPE_BYTES, MambaSpec, StatePart
from engine.model_configs.config_reader import ConfigReader


@dataclass(slots=True, frozen=True, kw_only=True)
class Mamba1Config:
    """One mixer: each of `inner_size` channels has its own state of `state_size` numbers.

    The channels' steps dt are a product of `dt_rank` numbers. `proj_bias`: of in_proj and out_proj.
    """

    inner_size: int
    state_size: int
    dt_rank: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool

    def spec(self, dtype: str) -> MambaSpec:
        """The cache contents of one such layer for one sequence."""
        return MambaSpec(
            kind="mamba1",
            parts=(
                StatePart((self.conv_kernel - 1, self.inner_size), dtype),
                # Channels side by side, for the operator's sake: there are few numbers in each.
                StatePart((self.state_size, self.inner_size)),
            ),
        )


def read_mamba1(reader: ConfigReader) -> Mamba1Config:
    """Reads the fields of Jamba (`mamba_expand`, ...). Raises CheckpointError."""
    hidden = reader.size("hidden_size")
    # "auto" is a sixteenth of the hidden channels, rounded up.
    rank = -(-hidden // 16)
    if reader.fields.get("mamba_dt_rank") != "auto":
        rank = reader.size("mamba_dt_rank", rank)
    return Mamba1Config(
        inner_size=reader.size("mamba_expand", 2) * hidden,
        state_size=reader.size("mamba_d_state", 16),
        dt_rank=rank,
        conv_kernel=reader.size("mamba_d_conv", 4),
        conv_bias=reader.get("mamba_conv_bias", bool, True),
        proj_bias=reader.get("mamba_proj_bias", bool, False),
    )


class Gating(StrEnum):
    """The order of norm and gate z after a recurrence's output y."""

    GATE_THEN_NORM = "norm(y * silu(z))"
    NORM_THEN_GATE = "norm(y) * silu(z)"
    NORM_THEN_SIGMOID = "norm(y) * sigmoid(z)"
    GATE_ONLY = "y * silu(z)"


@dataclass(slots=True, frozen=True, kw_only=True)
class Mamba2Config:
    """One mixer: `num_heads` heads of `head_dim` channels; each of `n_groups` has its B and C.

    `time_step_limit` clamps dt after softplus. `temporal_dtype`: of the states in the cache.
    `input_scale` and `output_scale` multiply what goes in and comes out, `projected_scales` z, x,
    B, C and dt as in_proj gives them.
    """

    num_heads: int
    head_dim: int
    state_size: int
    n_groups: int
    conv_kernel: int
    conv_bias: bool
    in_proj_bias: bool
    out_proj_bias: bool
    time_step_limit: tuple[float, float]
    temporal_dtype: str = "float32"
    gating: Gating = Gating.GATE_THEN_NORM
    input_scale: float = 1.0
    projected_scales: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 1.0)
    output_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        """Channels of x, of the gate z and of the output."""
        return self.num_heads * self.head_dim

    @property
    def conv_dim(self) -> int:
        """Channels that pass the convolution: x, B and C."""
        return self.inner_size + 2 * self.n_groups * self.state_size

    @property
    def projected_sizes(self) -> tuple[int, ...]:
        """Channels of z, x, B, C and dt, side by side in in_proj."""
        shared = self.n_groups * self.state_size
        return (self.inner_size, self.inner_size, shared, shared, self.num_heads)

    def spec(self, dtype: str) -> MambaSpec:
        """The cache contents of one such layer for one sequence."""
        return MambaSpec(
            kind="mamba2",
            parts=(
                StatePart((self.conv_kernel - 1, self.conv_dim), dtype),
                StatePart((self.num_heads, self.head_dim, self.state_size), self.temporal_dtype),
            ),
        )


def read_mamba2(reader: ConfigReader, inner_key: str | None = None) -> Mamba2Config:
    """Reads the fields of Bamba, Granite and Falcon-H1 (`mamba_n_heads`, ...).

    `inner_key`: the field with the channels of x; without one they are `mamba_expand` times
    `hidden_size`. Raises CheckpointError when heads, channels and groups do not fit together.
    """
    # Some families name the channels, others a multiple of hidden_size; heads must divide them.
    expanded = reader.size("mamba_expand", 2) * reader.size("hidden_size")
    inner = expanded if inner_key is None else reader.size(inner_key)
    heads = reader.size("mamba_n_heads", 128)
    groups = reader.size("mamba_n_groups", 1)
    reader.require_divisor(("mamba_n_heads", heads), ("mamba_n_groups", groups))
    channels = inner_key or "mamba_expand * hidden_size"
    reader.require_divisor((channels, inner), ("mamba_n_heads", heads))
    reader.require_one_of("mamba_d_head", ["auto", inner // heads])
    bias = reader.get("mamba_proj_bias", bool, False)
    return Mamba2Config(
        num_heads=heads,
        head_dim=inner // heads,
        state_size=reader.size("mamba_d_state", 256),
        n_groups=groups,
        conv_kernel=reader.size("mamba_d_conv", 4),
        conv_bias=reader.get("mamba_conv_bias", bool, True),
        in_proj_bias=bias,
        out_proj_bias=bias,
        time_step_limit=read_time_step_limit(reader, "time_step_limit"),
        temporal_dtype=read_temporal_dtype(reader),
    )


def read_temporal_dtype(reader: ConfigReader) -> str:
    """The dtype that states are kept in: `mamba_ssm_cache_dtype`, by default float32."""
    reader.require_one_of("mamba_ssm_cache_dtype", ["auto", *DTYPE_BYTES])
    stored: str = reader.get("mamba_ssm_cache_dtype", str, "auto")
    return "float32" if stored == "auto" else stored


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


@dataclass(slots=True, frozen=True, kw_only=True)
class GatedDeltaNetConfig:
    """One mixer; consecutive value heads share a key head.

    `beta_scale` multiplies beta after the sigmoid: with 2 a state's eigenvalues may be negative
    (arXiv 2411.12537). `norm_eps`: of the norm of the output (None: the model's).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    beta_scale: float = 1.0
    norm_eps: float | None = None

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
            parts=(
                StatePart((self.conv_kernel - 1, self.conv_dim), dtype),
                StatePart((self.value_heads, self.key_dim, self.value_dim)),
            ),
        )


def read_gated_delta_net(reader: ConfigReader) -> GatedDeltaNetConfig:
    """Reads the `linear_*` fields. Raises CheckpointError for heads that do not fit."""
    config = GatedDeltaNetConfig(
        key_heads=reader.size("linear_num_key_heads"),
        value_heads=reader.size("linear_num_value_heads"),
        key_dim=reader.size("linear_key_head_dim"),
        value_dim=reader.size("linear_value_head_dim"),
        conv_kernel=reader.size("linear_conv_kernel_dim", 4),
    )
    values = ("linear_num_value_heads", config.value_heads)
    reader.require_divisor(values, ("linear_num_key_heads", config.key_heads))
    return config


@dataclass(slots=True, frozen=True, kw_only=True)
class ShortConvConfig:
    """One gated convolution over `conv_kernel` tokens of the model's `channels`.

    `bias` is for the convolution and both products.
    """

    channels: int
    conv_kernel: int
    bias: bool = False

    def spec(self, dtype: str) -> MambaSpec:
        """The cache contents of one such layer for one sequence: the convolution's last inputs."""
        return MambaSpec(
            kind="short_conv", parts=(StatePart((self.conv_kernel - 1, self.channels), dtype),)
        )


def read_short_conv(reader: ConfigReader) -> ShortConvConfig:
    """Reads LFM2's `conv_*` fields. Raises CheckpointError for a kernel that keeps nothing."""
    config = ShortConvConfig(
        channels=reader.size("hidden_size"),
        conv_kernel=reader.size("conv_L_cache", 3),
        bias=reader.get("conv_bias", bool, False),
    )
    if config.conv_kernel < 2:
        raise CheckpointError(
            f"{reader.source}: 'conv_L_cache' is {config.conv_kernel}, expected at least 2"
        )
    return config


@dataclass(slots=True, frozen=True, kw_only=True)
class LightningAttentionConfig:
    """Linear attention whose heads forget, each at a rate that follows from its place in the model.

    `output_scale` multiplies what comes out.
    """

    num_heads: int
    head_dim: int
    output_scale: float = 1.0

    def spec(self, dtype: str) -> MambaSpec:
        """The cache contents of one such layer for one sequence: the sum of v k^T of each head."""
        shape = (self.num_heads, self.head_dim, self.head_dim)
        return MambaSpec(kind="lightning_attention", parts=(StatePart(shape),))


@dataclass(slots=True, frozen=True, kw_only=True)
class KimiDeltaAttentionConfig:
    """One mixer; queries, keys and values have `num_heads` heads of `head_dim` channels each."""

    num_heads: int
    head_dim: int
    conv_kernel: int

    @property
    def inner_size(self) -> int:
        """Channels of all queries, of all keys, of all values and of the gate."""
        return self.num_heads * self.head_dim

    def spec(self, dtype: str) -> MambaSpec:
        """The cache contents of one such layer for one sequence."""
        return MambaSpec(
            kind="kimi_delta_attention",
            parts=(
                StatePart((self.conv_kernel - 1, 3 * self.inner_size), dtype),
                StatePart((self.num_heads, self.head_dim, self.head_dim)),
            ),
        )


def read_kimi_delta_attention(reader: ConfigReader) -> KimiDeltaAttentionConfig:
    """Reads the hub's `linear_attn_config`, else the `linear_*` of transformers 5."""
    # transformers 5 reads the hub's nested object too, but saves what it says at top level.
    key = "linear_attn_config"
    if reader.get(key, dict, None) is not None:
        nested, names = reader.section(key), ("num_heads", "head_dim", "short_conv_kernel_size")
    else:
        nested = reader
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    return KimiDeltaAttentionConfig(
        num_heads=nested.size(names[0]),
        head_dim=nested.size(names[1]),
        conv_kernel=nested.size(names[2], 4),
    )
