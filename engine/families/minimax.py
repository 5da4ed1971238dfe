"""MiniMax-01: lightning attention with a full-attention layer now and then, experts in every layer.

Every part is added to its normed input, not to the residual before the norm.
"""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import FULL, AttentionConfig, read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, read_router
from engine.model_configs.model_config import Block, ModelConfig, NamedPart, Renames, read_model
from engine.model_configs.recurrent import LightningAttentionConfig
from engine.model_configs.rope import read_rope

LIGHTNING = "linear_attention"
# That of transformers' class.
THETA = 1_000_000.0
# The hub's names of the experts, those of transformers 5 in memory, and buffers that are computed.
RENAMES: Renames = (
    (r"\.(slope_rate|query_decay|key_decay|diagonal_decay)$", None),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.", ".gate_proj."),
    (r"\.w3\.", ".up_proj."),
    (r"\.w2\.", ".down_proj."),
)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader = reader.with_defaults({"rope_theta": THETA})
    _check(reader)
    attention = _attention(reader)
    lightning = LightningAttentionConfig(
        num_heads=attention.num_heads,
        head_dim=attention.head_dim,
        output_scale=reader.get("linear_attn_beta_factor", float, 1.0),
    )
    mixers = {
        FULL: _block(reader, "full_attn", ("self_attn", attention)),
        LIGHTNING: _block(reader, "linear_attn", ("self_attn", lightning)),
    }
    scale = reader.get("mlp_beta_factor", float, 1.0)
    experts = ExpertsConfig(
        # The largest of all experts' softmax, renormalised, times what the result is added with.
        router=read_router(reader, "num_local_experts", scale=scale),
        intermediate_size=reader.size("intermediate_size"),
    )
    last = _block(reader, "mlp", ("mlp", experts), norm="post_attention_layernorm")
    layers = range(1, 1 + reader.num_layers)
    kinds = reader.layer_types([FULL if n % 2 else LIGHTNING for n in layers], (FULL, LIGHTNING))
    return read_model(
        reader,
        positions=131_072,
        eps=1e-5,
        layers=tuple((mixers[kind], last) for kind in kinds),
        renames=RENAMES,
    )


def _check(reader: ConfigReader) -> None:
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("attention_bias", [False])
    reader.require_one_of("sliding_window", [])
    reader.require_one_of("shared_intermediate_size", [0])
    reader.require_one_of("postnorm", [True])
    if "attn_type_list" in reader.fields and "layer_types" not in reader.fields:
        raise CheckpointError(
            f"{reader.source}: 'attn_type_list' is of the model's first code; a file for "
            "transformers names the same layers in 'layer_types'"
        )


def _attention(reader: ConfigReader) -> AttentionConfig:
    """Of each head only `rotary_dim` channels are rotated, in files that have the field.

    transformers ignores it, the models were trained with it (its issue 48241, of the next model).
    """
    attention = read_attention(reader)
    rotated = reader.size("rotary_dim", attention.head_dim)
    return replace(
        attention,
        rope=read_rope(reader, attention.head_dim, rotated / attention.head_dim),
        output_scale=reader.get("full_attn_beta_factor", float, 1.0),
    )


def _block(
    reader: ConfigReader, kind: str, part: NamedPart, *, norm: str = "input_layernorm"
) -> Block:
    scale = reader.get(f"{kind}_alpha_factor", float, 1.0)
    return Block(norm=norm, parts=(part,), normed_residual=scale)
