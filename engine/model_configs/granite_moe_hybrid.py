"""Settings of GraniteMoeHybrid: Mamba2 and attention layers, dense or with experts."""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.mixers import read_attention, read_mamba2
from engine.model_configs.model_config import (
    ExpertsConfig,
    MixerConfig,
    MLPConfig,
    ModelConfig,
    read_model,
)

MAMBA = ("mamba", "linear_attention")
ATTENTION = ("attention", "full_attention")


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported.

    `residual_multiplier` multiplies what mixers and feed-forward blocks add to the residual.
    """
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("normalization_function", ["rmsnorm"])
    reader.require_one_of("position_embedding_type", ["nope", "rope"])
    reader.require_one_of("partial_rotary_factor", [1.0])
    divisor: float = reader.get("logits_scaling", float, 1.0)
    if divisor == 0.0:
        raise CheckpointError(f"{reader.source}: 'logits_scaling' is 0; logits are divided by it")
    count = reader.require("num_hidden_layers", int)
    names = reader.get("layers_block_type", list, [MAMBA[0]] * count)
    is_mamba = [name in MAMBA for name in reader.layer_types(names, (*MAMBA, *ATTENTION))]
    scale = reader.get("residual_multiplier", float, 1.0)
    rotated = reader.get("position_embedding_type", str, "nope") == "rope"
    attention = replace(
        read_attention(reader, rotary=1.0 if rotated else None),
        scale=reader.get("attention_multiplier", float, 1.0),
        output_scale=scale,
    )
    # A model without Mamba layers need not name sizes of them.
    mamba: MixerConfig = attention
    if any(is_mamba):
        mamba = replace(read_mamba2(reader), output_scale=scale)
    return read_model(
        reader,
        family="granite_moe_hybrid",
        positions=2048,
        eps=1e-6,
        mixers=tuple((mamba if recurrent else attention,) for recurrent in is_mamba),
        mlp=MLPConfig(
            intermediate_size=reader.get("shared_intermediate_size", int, 1024), output_scale=scale
        ),
        experts=_experts(reader, scale),
        embedding_scale=reader.get("embedding_multiplier", float, 1.0),
        logits_scale=1.0 / divisor,
    )


def _experts(reader: ConfigReader, scale: float) -> ExpertsConfig | None:
    count = reader.get("num_local_experts", int, 8)
    if count == 0:
        return None
    top_k = reader.get("num_experts_per_tok", int, 2)
    if not 0 < top_k <= count:
        raise CheckpointError(
            f"{reader.source}: 'num_experts_per_tok' is {top_k} of {count} 'num_local_experts'"
        )
    return ExpertsConfig(
        count=count,
        top_k=top_k,
        intermediate_size=reader.require("intermediate_size", int),
        output_scale=scale,
    )
