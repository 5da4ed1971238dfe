"""Bamba: Mamba2 layers with an attention layer now and then, each with an MLP."""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import read_mlp
from engine.model_configs.model_config import ModelConfig, Renames, decoder_layer, read_model
from engine.model_configs.recurrent import read_mamba2
from engine.model_configs.rope import read_rope

PARTIAL_ROTARY = 0.5
NORMS = ("input_layernorm", "pre_ff_layernorm")
RENAMES: Renames = (
    (r"mup_vector$", None),
    (r"^model\.final_layernorm\.", "model.norm."),
)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader.require_one_of("hidden_act", ["silu"])
    # transformers reads this one from `rope_parameters` only, and else takes one half.
    reader.require_one_of("partial_rotary_factor", [PARTIAL_ROTARY])
    layers = reader.num_layers
    found = reader.get("attn_layer_indices", list, [])
    if not all(layer in range(layers) and not isinstance(layer, bool) for layer in found):
        raise CheckpointError(
            f"{reader.source}: 'attn_layer_indices' is {found!r}, expected layers below {layers}"
        )
    mamba, attention = ("mamba", read_mamba2(reader)), read_attention(reader)
    rope = read_rope(reader, attention.head_dim, PARTIAL_ROTARY)
    reader.require_one_of("attn_rotary_emb", [rope.rotary_dim])
    full = ("self_attn", replace(attention, rope=rope))
    mlp = ("feed_forward", read_mlp(reader))
    return read_model(
        reader,
        positions=262144,
        eps=1e-5,
        layers=tuple(
            decoder_layer([full if layer in found else mamba], [mlp], norms=NORMS)
            for layer in range(layers)
        ),
        renames=RENAMES,
    )
