"""Settings of Bamba: Mamba2 layers with an attention layer now and then, each with an MLP."""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.mixers import read_attention, read_mamba2, read_rope
from engine.model_configs.model_config import ModelConfig, read_mlp, read_model

PARTIAL_ROTARY = 0.5


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader.require_one_of("hidden_act", ["silu"])
    # transformers reads this one from `rope_parameters` only, and else takes one half.
    reader.require_one_of("partial_rotary_factor", [PARTIAL_ROTARY])
    layers = reader.require("num_hidden_layers", int)
    found = reader.get("attn_layer_indices", list, [])
    if not all(layer in range(layers) and not isinstance(layer, bool) for layer in found):
        raise CheckpointError(
            f"{reader.source}: 'attn_layer_indices' is {found!r}, expected layers below {layers}"
        )
    mamba, attention = read_mamba2(reader), read_attention(reader)
    rope = read_rope(reader, attention.head_dim, PARTIAL_ROTARY)
    reader.require_one_of("attn_rotary_emb", [rope.rotary_dim])
    attention = replace(attention, rope=rope)
    return read_model(
        reader,
        family="bamba",
        positions=262144,
        eps=1e-5,
        mixers=tuple((attention if i in found else mamba,) for i in range(layers)),
        mlp=read_mlp(reader),
    )
