"""Olmo Hybrid: gated delta net layers with a full-attention layer now and then, each with an MLP.

The former norm what goes into a part, the latter what comes out of it.
"""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import QKNorm, read_attention, read_layer_types
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import read_mlp
from engine.model_configs.model_config import (
    Block,
    ModelConfig,
    Renames,
    decoder_layer,
    read_model,
)
from engine.model_configs.recurrent import GatedDeltaNetConfig, read_gated_delta_net
from engine.model_configs.rope import RopeConfig, read_rope

LINEAR = "linear_attention"
# The hub's names; transformers 5 has the norms and the convolutions under others in memory.
RENAMES: Renames = (
    (r"^mtp\.|rotary_emb\.inv_freq$", None),
    (r"\.attention_layer_norm\.", ".input_layernorm."),
    (r"\.feedforward_layer_norm\.", ".post_attention_layernorm."),
    (r"\.linear_attn\.g_proj\.", ".linear_attn.in_proj_z."),
    (r"\.linear_attn\.([ab])_proj\.", r".linear_attn.in_proj_\1."),
    (r"\.linear_attn\.o_proj\.", ".linear_attn.out_proj."),
    (r"\.linear_attn\.o_norm\.", ".linear_attn.norm."),
)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("linear_use_gate", [True])
    attention = read_attention(reader)
    rope = _rope(reader, attention.head_dim)
    full = ("self_attn", replace(attention, qk_norm=QKNorm.ALL_HEADS, rope=rope))
    mlp = ("mlp", read_mlp(reader))
    normed_after = (
        Block(norm=None, parts=(full,), post_norm="post_attention_layernorm"),
        Block(norm=None, parts=(mlp,), post_norm="post_feedforward_layernorm"),
    )
    normed_before = decoder_layer([("linear_attn", _linear(reader))], [mlp])
    types = read_layer_types(reader, LINEAR, key="full_attention_interval", interval=4)
    return read_model(
        reader,
        positions=65536,
        eps=1e-6,
        layers=tuple(normed_before if kind == LINEAR else normed_after for kind in types),
        renames=RENAMES,
    )


def _rope(reader: ConfigReader, head_dim: int) -> RopeConfig | None:
    """No positions where `rope_theta` is null; a file that does not say it may mean either."""
    rope = ConfigReader(reader.get("rope_parameters", dict, {}), f"{reader.source}:rope_parameters")
    stated = [fields for fields in (rope.fields, reader.fields) if "rope_theta" in fields]
    if not stated:
        raise CheckpointError(
            f"{reader.source}: 'rope_parameters' has no 'rope_theta': give a number, or null for "
            "no positions"
        )
    if stated[0]["rope_theta"] is None:
        return None
    for settings in (rope, reader):
        settings.require_one_of("partial_rotary_factor", [1.0])
    return replace(read_rope(reader, head_dim), wide=True)


def _linear(reader: ConfigReader) -> GatedDeltaNetConfig:
    heads = reader.size("num_attention_heads")
    key_heads = reader.size("linear_num_key_heads", heads)
    key_dim = int(0.75 * reader.size("hidden_size") / key_heads)
    key_dim = reader.size("linear_key_head_dim", key_dim)
    # Those of transformers' class.
    defaults = {
        "linear_num_key_heads": heads,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": 2 * key_dim,
    }
    negative = reader.get("linear_allow_neg_eigval", bool, True)
    return replace(
        read_gated_delta_net(reader.with_defaults(defaults)),
        beta_scale=2.0 if negative else 1.0,
        # Fixed in the code that the models were trained with.
        norm_eps=1e-5,
    )
