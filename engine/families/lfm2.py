"""LFM2: gated short convolutions with an attention layer now and then, each with an MLP."""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.kv_cache.spec import round_up
from engine.model_configs.attention import FULL, QKNorm, read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import MLPConfig
from engine.model_configs.model_config import (
    ModelConfig,
    NamedPart,
    Renames,
    decoder_layer,
    read_model,
)
from engine.model_configs.recurrent import read_short_conv

CONV = "conv"
NORMS = ("operator_norm", "ffn_norm")
# Those of transformers' class; hub files leave some out.
DEFAULTS = {"rope_theta": 1_000_000.0, "tie_word_embeddings": True}
# Fields of old files, which count where they are: to the names of new ones.
OLD_NAMES = {"tie_embedding": "tie_word_embeddings", "block_ff_dim": "intermediate_size"}
RENAMES: Renames = (
    (r"^model\.embedding_norm\.", "model.norm."),
    (r"\.self_attn\.out_proj\.", ".self_attn.o_proj."),
    (r"\.self_attn\.([qk])_layernorm\.", r".self_attn.\1_norm."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader = with_defaults(reader)
    mlp: NamedPart = ("feed_forward", MLPConfig(intermediate_size=_mlp_size(reader)))
    return read_layers(reader, [mlp] * reader.num_layers)


def with_defaults(reader: ConfigReader) -> ConfigReader:
    """The same file, with the names of new files and what hub files leave out."""
    values = ((new, reader.fields.get(old)) for old, new in OLD_NAMES.items())
    renamed = {new: value for new, value in values if value is not None}
    return ConfigReader(reader.fields | renamed, reader.source).with_defaults(DEFAULTS)


def read_layers(reader: ConfigReader, feed_forward: list[NamedPart]) -> ModelConfig:
    """The model whose layer i ends with `feed_forward[i]`. Raises CheckpointError."""
    hidden = reader.size("hidden_size")
    for key in ("block_dim", "conv_dim", "conv_dim_out"):
        reader.require_one_of(key, [hidden])
    for key in ("block_use_swiglu", "use_pos_enc"):
        reader.require_one_of(key, [True])
    reader.require_one_of("attention_bias", [False])
    attention = replace(read_attention(reader, rotary=1.0), qk_norm=QKNorm.BY_HEAD)
    mixers: dict[str, NamedPart] = {
        FULL: ("self_attn", attention),
        CONV: ("conv", read_short_conv(reader)),
    }
    kinds = reader.layer_types(_default_types(reader), (FULL, CONV))
    return read_model(
        reader,
        positions=128_000,
        eps=1e-5,
        rms_norm_eps=reader.get("norm_eps", float, 1e-5),
        layers=tuple(
            decoder_layer([mixers[kind]], [part], norms=NORMS)
            for kind, part in zip(kinds, feed_forward, strict=True)
        ),
        renames=RENAMES,
    )


def _default_types(reader: ConfigReader) -> list[str]:
    """By the list `full_attn_idxs` of old files; without one every layer is attention."""
    layers = range(reader.num_layers)
    full = reader.get("full_attn_idxs", list, [*layers])
    if not all(layer in layers and not isinstance(layer, bool) for layer in full):
        raise CheckpointError(
            f"{reader.source}: 'full_attn_idxs' is {full!r}, expected layers below {len(layers)}"
        )
    return [FULL if layer in full else CONV for layer in layers]


def _mlp_size(reader: ConfigReader) -> int:
    """`intermediate_size`, or two thirds of it, times a factor and rounded up."""
    size = reader.size("intermediate_size")
    if not reader.get("block_auto_adjust_ff_dim", bool, True):
        return size
    size = int(reader.get("block_ffn_dim_multiplier", float, 1.0) * int(2 * size / 3))
    return round_up(size, reader.size("block_multiple_of", 256))
