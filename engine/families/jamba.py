"""Jamba: Mamba1 layers with an attention layer now and then, each with an MLP or experts."""

from engine.errors import CheckpointError
from engine.families import bamba
from engine.model_configs.attention import read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, read_mlp, read_router
from engine.model_configs.model_config import (
    ModelConfig,
    NamedPart,
    Renames,
    decoder_layer,
    read_model,
)
from engine.model_configs.recurrent import read_mamba1

RENAMES: Renames = (
    *bamba.RENAMES,
    (r"\.feed_forward\.router\.", ".feed_forward.gate."),
)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported.

    Of every `attn_layer_period` layers the one at `attn_layer_offset` has attention, without
    positions; of every `expert_layer_period` the one at `expert_layer_offset` has experts.
    """
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("attention_bias", [False])
    reader.require_one_of("mamba_inner_layernorms", [True])
    reader.require_one_of("sliding_window", [])
    mamba: NamedPart = ("mamba", read_mamba1(reader))
    attention: NamedPart = ("self_attn", read_attention(reader))
    mlp: NamedPart = ("feed_forward", read_mlp(reader))
    experts = _experts(reader) if reader.count("num_experts", 16) > 1 else mlp
    has_attention = _every(reader, "attn_layer", period=8, offset=4)
    has_experts = _every(reader, "expert_layer", period=2, offset=1)
    return read_model(
        reader,
        positions=262144,
        eps=1e-6,
        layers=tuple(
            decoder_layer(
                [attention if attends else mamba], [experts if sparse else mlp], norms=bamba.NORMS
            )
            for attends, sparse in zip(has_attention, has_experts, strict=True)
        ),
        renames=RENAMES,
    )


def _experts(reader: ConfigReader) -> NamedPart:
    router = read_router(reader, "num_experts", renormalise=False)
    size = reader.size("intermediate_size")
    return "feed_forward", ExpertsConfig(router=router, intermediate_size=size)


def _every(reader: ConfigReader, kind: str, *, period: int, offset: int) -> list[bool]:
    """Which layers are of this kind; `period` and `offset` are the defaults."""
    period = reader.size(f"{kind}_period", period)
    offset = reader.count(f"{kind}_offset", offset)
    if not 0 <= offset < period:
        raise CheckpointError(
            f"{reader.source}: '{kind}_offset' is {offset}, not below '{kind}_period' {period}"
        )
    return [layer % period == offset for layer in range(reader.num_layers)]
