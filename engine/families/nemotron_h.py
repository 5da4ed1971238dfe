"""Nemotron-H: Mamba2, attention, feed-forward and experts layers, one kind each.

config.json and tensors are named as on the hub or as transformers 5 saves them.
"""

from engine.errors import CheckpointError
from engine.model_configs.attention import read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import (
    Activation,
    ExpertsConfig,
    MLPConfig,
    read_sigmoid_router,
)
from engine.model_configs.model_config import Block, ModelConfig, NamedPart, Renames, read_model
from engine.model_configs.recurrent import Mamba2Config, read_temporal_dtype, read_time_step_limit

MAMBA, ATTENTION, MLP, MOE = "mamba", "attention", "mlp", "moe"
# Characters of `hybrid_override_pattern`, and names in `layers_block_type`, old and new.
LAYER_NAMES = {
    "M": MAMBA,
    "*": ATTENTION,
    "-": MLP,
    "E": MOE,
    "mamba": MAMBA,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": MOE,
    "linear_attention": MAMBA,
    "full_attention": ATTENTION,
}
RENAMES: Renames = (
    (r"^backbone\.", "model."),
    (r"^model\.embeddings\.", "model.embed_tokens."),
    (r"^model\.norm_f\.", "model.norm."),
)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError for missing, mistyped or unsupported fields.

    A layer is one mixer, one MLP, or experts with a shared MLP beside them; attention has no
    positional encoding.
    """
    reader.require_one_of("mlp_hidden_act", ["relu2"])
    reader.require_one_of("mamba_hidden_act", ["silu"])
    kinds = _layer_kinds(reader)
    parts: dict[str, tuple[NamedPart, ...]] = {
        MAMBA: (("mixer", _mamba(reader)),),
        ATTENTION: (("mixer", read_attention(reader)),),
    }
    if MLP in kinds:
        parts[MLP] = (("mixer", _mlp(reader, "intermediate_size")),)
    if MOE in kinds:
        shared = _mlp(reader, "moe_shared_expert_intermediate_size")
        parts[MOE] = (("mixer", _experts(reader)), ("mixer.shared_experts", shared))
    # Hub files of different ages spell it in three ways; transformers reads the last of these.
    eps: float = 1e-5
    for key in ("norm_eps", "rms_norm_eps", "layer_norm_epsilon"):
        eps = reader.get(key, float, eps)
    return read_model(
        reader,
        positions=4096,
        eps=eps,
        rms_norm_eps=eps,
        layers=tuple((Block(norm="norm", parts=parts[kind]),) for kind in kinds),
        renames=RENAMES,
        residual_in_fp32=reader.get("residual_in_fp32", bool, False),
    )


def _layer_kinds(reader: ConfigReader) -> tuple[str, ...]:
    names: str | list[str] = reader.get("hybrid_override_pattern", str, "")
    for key in ("layers_block_type", "layer_types"):
        names = reader.get(key, list, names)
    if not names:
        raise CheckpointError(
            f"{reader.source} has neither 'hybrid_override_pattern' nor 'layers_block_type'"
        )
    stated = reader.size("num_hidden_layers", len(names))
    if stated != len(names):
        raise CheckpointError(
            f"{reader.source}: 'num_hidden_layers' is {stated}, but {len(names)} layers are listed"
        )
    for index, name in enumerate(names):
        if str(name) not in LAYER_NAMES:
            expected = f"expected one of {', '.join(LAYER_NAMES)}"
            raise CheckpointError(f"{reader.source}: layer {index} is {name!r}, {expected}")
    return tuple(LAYER_NAMES[str(name)] for name in names)


def _mlp(reader: ConfigReader, size: str) -> MLPConfig:
    return MLPConfig(
        intermediate_size=reader.size(size),
        bias=reader.get("mlp_bias", bool, False),
        activation=Activation.RELU2,
        gated=False,
    )


def _experts(reader: ConfigReader) -> ExpertsConfig:
    reader.require_one_of("n_shared_experts", [1])
    # Neither experts nor the products around a latent space have one in any published model.
    reader.require_one_of("mlp_bias", [False])
    return ExpertsConfig(
        router=read_sigmoid_router(reader, "n_routed_experts"),
        intermediate_size=reader.size("moe_intermediate_size"),
        activation=Activation.RELU2,
        gated=False,
        latent_size=reader.optional_size("moe_latent_size"),
    )


def _mamba(reader: ConfigReader) -> Mamba2Config:
    # Names with "mamba_" are aliases that transformers accepts too.
    limit = "mamba_dt_limit" if "mamba_dt_limit" in reader.fields else "time_step_limit"
    bias = reader.get("use_bias", bool, False)
    config = Mamba2Config(
        num_heads=reader.size("mamba_num_heads"),
        head_dim=reader.size("mamba_head_dim"),
        state_size=reader.size("ssm_state_size"),
        n_groups=reader.size("mamba_n_groups", reader.size("n_groups", 8)),
        conv_kernel=reader.size("mamba_d_conv", reader.size("conv_kernel", 4)),
        conv_bias=reader.get("mamba_conv_bias", bool, reader.get("use_conv_bias", bool, True)),
        in_proj_bias=bias,
        out_proj_bias=bias,
        time_step_limit=read_time_step_limit(reader, limit),
        temporal_dtype=read_temporal_dtype(reader),
    )
    reader.require_divisor(("mamba_num_heads", config.num_heads), ("n_groups", config.n_groups))
    return config
