"""config.json of NemotronHForCausalLM, spelled as on the hub or as transformers 5 saves it."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from engine.errors import CheckpointError
from engine.kv_cache.spec import LayerSpec
from engine.model_configs.attention import AttentionConfig, read_attention
from engine.model_configs.base import ConfigReader, ModelConfig
from engine.model_configs.checks import (
    compute_dtype,
    reject_quantization,
    require_divisor,
    require_one_of,
)
from engine.model_configs.mamba2 import Mamba2Config, read_temporal_dtype, read_time_step_limit


class LayerKind(StrEnum):
    """What one layer is; each has a norm, one mixer and a residual."""

    MAMBA = "mamba"
    ATTENTION = "attention"
    MLP = "mlp"


# Characters of `hybrid_override_pattern`, and names in `layers_block_type`, old and new.
LAYER_NAMES = {
    "M": LayerKind.MAMBA,
    "*": LayerKind.ATTENTION,
    "-": LayerKind.MLP,
    "mamba": LayerKind.MAMBA,
    "attention": LayerKind.ATTENTION,
    "mlp": LayerKind.MLP,
    "linear_attention": LayerKind.MAMBA,
    "full_attention": LayerKind.ATTENTION,
}
MOE_NAMES = ("E", "moe")


@dataclass(slots=True, frozen=True, kw_only=True)
class NemotronHConfig(ModelConfig):
    """Nemotron-H: `layer_kinds[i]` says what layer i is. Attention has no positional encoding."""

    layer_kinds: tuple[LayerKind, ...]
    mamba: Mamba2Config
    attention: AttentionConfig
    intermediate_size: int
    mlp_bias: bool
    residual_in_fp32: bool

    @classmethod
    def from_reader(cls, reader: ConfigReader, dtype: str | None = None) -> Self:
        """Raises CheckpointError for what is missing, mistyped or not supported (MoE layers)."""
        _check(reader)
        dtype = compute_dtype(reader, dtype)
        kinds = _layer_kinds(reader)
        mamba, attention = _mamba(reader), read_attention(reader)
        specs: dict[LayerKind, tuple[LayerSpec, ...]] = {
            LayerKind.MAMBA: (mamba.spec(dtype, read_temporal_dtype(reader)),),
            LayerKind.ATTENTION: (attention.spec(dtype),),
            LayerKind.MLP: (),
        }
        has_mlp = LayerKind.MLP in kinds
        return cls(
            architecture="NemotronHForCausalLM",
            vocab_size=reader.require("vocab_size", int),
            hidden_size=reader.require("hidden_size", int),
            num_layers=len(kinds),
            max_position_embeddings=reader.get("max_position_embeddings", int, 4096),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, False),
            rms_norm_eps=_norm_eps(reader),
            dtype=dtype,
            layer_specs=tuple(specs[kind] for kind in kinds),
            layer_kinds=kinds,
            mamba=mamba,
            attention=attention,
            intermediate_size=reader.require("intermediate_size", int) if has_mlp else 0,
            mlp_bias=reader.get("mlp_bias", bool, False),
            residual_in_fp32=reader.get("residual_in_fp32", bool, False),
        )


def _check(reader: ConfigReader) -> None:
    reject_quantization(reader)
    require_one_of(reader, "mlp_hidden_act", ["relu2"])
    require_one_of(reader, "mamba_hidden_act", ["silu"])


def _layer_kinds(reader: ConfigReader) -> tuple[LayerKind, ...]:
    names: str | list[str] = reader.get("hybrid_override_pattern", str, "")
    for key in ("layers_block_type", "layer_types"):
        names = reader.get(key, list, names)
    if not names:
        raise CheckpointError(
            f"{reader.source} has neither 'hybrid_override_pattern' nor 'layers_block_type'"
        )
    stated = reader.get("num_hidden_layers", int, len(names))
    if stated != len(names):
        raise CheckpointError(
            f"{reader.source}: 'num_hidden_layers' is {stated}, but {len(names)} layers are listed"
        )
    return tuple(_layer_kind(reader, index, name) for index, name in enumerate(names))


def _layer_kind(reader: ConfigReader, index: int, name: str) -> LayerKind:
    if name in MOE_NAMES:
        raise CheckpointError(
            f"{reader.source}: layer {index} is a mixture of experts ({name!r}): not supported"
        )
    if str(name) not in LAYER_NAMES:
        raise CheckpointError(
            f"{reader.source}: layer {index} is {name!r}, expected one of {', '.join(LAYER_NAMES)}"
        )
    return LAYER_NAMES[str(name)]


def _mamba(reader: ConfigReader) -> Mamba2Config:
    # Names with "mamba_" are aliases that transformers accepts too.
    limit = "mamba_dt_limit" if "mamba_dt_limit" in reader.fields else "time_step_limit"
    bias = reader.get("use_bias", bool, False)
    config = Mamba2Config(
        num_heads=reader.require("mamba_num_heads", int),
        head_dim=reader.require("mamba_head_dim", int),
        state_size=reader.require("ssm_state_size", int),
        n_groups=reader.get("mamba_n_groups", int, reader.get("n_groups", int, 8)),
        conv_kernel=reader.get("mamba_d_conv", int, reader.get("conv_kernel", int, 4)),
        conv_bias=reader.get("mamba_conv_bias", bool, reader.get("use_conv_bias", bool, True)),
        in_proj_bias=bias,
        out_proj_bias=bias,
        time_step_limit=read_time_step_limit(reader, limit),
    )
    require_divisor(reader, ("mamba_num_heads", config.num_heads), ("n_groups", config.n_groups))
    return config


def _norm_eps(reader: ConfigReader) -> float:
    """Hub files of different ages spell it in three ways; transformers reads the first."""
    eps: float = 1e-5
    for key in ("norm_eps", "rms_norm_eps", "layer_norm_epsilon"):
        eps = reader.get(key, float, eps)
    return eps
