"""GraniteMoeHybrid: Mamba2 or attention, then a shared MLP and perhaps experts, in every layer."""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, MLPConfig, read_router
from engine.model_configs.model_config import (
    ModelConfig,
    NamedPart,
    Renames,
    decoder_layer,
    read_model,
)
from engine.model_configs.recurrent import read_mamba2

MAMBA = ("mamba", "linear_attention")
ATTENTION = ("attention", "full_attention")
# The hub's names, and those that transformers 5 has in memory, to those of other families.
RENAMES: Renames = (
    (r"\.shared_mlp\.input_linear\.", ".shared_mlp.gate_up_proj."),
    (r"\.shared_mlp\.output_linear\.", ".shared_mlp.down_proj."),
    (r"\.block_sparse_moe\.input_linear\.weight$", ".block_sparse_moe.experts.gate_up_proj"),
    (r"\.block_sparse_moe\.output_linear\.weight$", ".block_sparse_moe.experts.down_proj"),
    (r"\.block_sparse_moe\.router\.(layer\.)?weight$", ".block_sparse_moe.gate.weight"),
)


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
    count = reader.num_layers
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
    full: NamedPart = ("self_attn", attention)
    mamba = full
    if any(is_mamba):
        mamba = ("mamba", replace(read_mamba2(reader), output_scale=scale))
    feed_forward = _feed_forward(reader, scale)
    return read_model(
        reader,
        positions=2048,
        eps=1e-6,
        layers=tuple(
            decoder_layer([mamba if recurrent else full], feed_forward) for recurrent in is_mamba
        ),
        renames=RENAMES,
        embedding_scale=reader.get("embedding_multiplier", float, 1.0),
        logits_scale=1.0 / divisor,
    )


def _feed_forward(reader: ConfigReader, scale: float) -> list[NamedPart]:
    size = reader.size("shared_intermediate_size", 1024)
    shared = ("shared_mlp", MLPConfig(intermediate_size=size, output_scale=scale))
    reader = reader.with_defaults({"num_local_experts": 8, "num_experts_per_tok": 2})
    if reader.count("num_local_experts") == 0:
        return [shared]
    experts = ExpertsConfig(
        router=read_router(reader, "num_local_experts", scale=scale),
        intermediate_size=reader.size("intermediate_size"),
    )
    return [shared, ("block_sparse_moe", experts)]
