"""Gemma 3 text: sliding-window layers with a full-attention layer now and then; norms all around.

Bare or inside the vision-language wrapper.

Hub files leave out what equals the class defaults of transformers.
"""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import FULL, QKNorm, read_attention, read_layer_types
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import Activation, read_mlp
from engine.model_configs.model_config import Block, ModelConfig, NamedPart, Renames, read_model
from engine.model_configs.rope import RopeConfig, rope_of

SLIDING = "sliding_attention"
# Those of transformers' class.
DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256.0,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
# Wrapped models are stored as `language_model.model.*` on the hub, and as `model.language_model.*`
# by some versions of transformers.
RENAMES: Renames = (
    (r"^model\.language_model\.", "model."),
    (r"^language_model\.", ""),
)
# By kind of layer: where files of transformers 4 say the base of its rotation, and its default.
THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    text = reader.text_part().with_defaults(DEFAULTS)
    _check(text)
    attention = read_attention(text)
    scalar: float = text.require("query_pre_attn_scalar", float)
    if scalar <= 0.0:
        raise CheckpointError(f"{text.source}: 'query_pre_attn_scalar' is {scalar}, not positive")
    rope = _rope(text, FULL, attention.head_dim)
    full = replace(attention, scale=scalar**-0.5, rope=rope, qk_norm=QKNorm.BY_HEAD)
    local_rope = _rope(text, SLIDING, full.head_dim)
    near = replace(full, rope=local_rope, window=text.size("sliding_window"))
    mixers = {FULL: full, SLIDING: near}
    mlp = replace(read_mlp(text), activation=Activation.GELU_TANH)
    types = read_layer_types(text, SLIDING, key="sliding_window_pattern", interval=6)
    return read_model(
        text,
        positions=131_072,
        eps=1e-6,
        layers=tuple(_layer(("self_attn", mixers[kind]), ("mlp", mlp)) for kind in types),
        renames=RENAMES,
        # transformers rounds this factor to the compute dtype, and models were trained so.
        embedding_scale=text.size("hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        norm_offset=1.0,
        logit_softcap=text.get("final_logit_softcapping", float, None),
    )


def _layer(mixer: NamedPart, mlp: NamedPart) -> tuple[Block, Block]:
    """Attention and MLP, each normed before and after."""
    return (
        Block(norm="input_layernorm", parts=(mixer,), post_norm="post_attention_layernorm"),
        Block(
            norm="pre_feedforward_layernorm",
            parts=(mlp,),
            post_norm="post_feedforward_layernorm",
        ),
    )


def _check(text: ConfigReader) -> None:
    text.require_one_of("model_type", ["gemma3_text"])
    text.require_one_of("hidden_activation", ["gelu_pytorch_tanh"])
    text.require_one_of("attention_bias", [False])
    text.require_one_of("attn_logit_softcapping", [])
    text.require_one_of("use_bidirectional_attention", [False])
    if text.get("final_logit_softcapping", float, 1.0) <= 0.0:
        raise CheckpointError(f"{text.source}: 'final_logit_softcapping' must be positive")


def _rope(text: ConfigReader, kind: str, head_dim: int) -> RopeConfig:
    """Reads rope settings: nested by layer type since transformers 5, at top level before."""
    nested = ConfigReader(text.get("rope_parameters", dict, {}), f"{text.source}:rope_parameters")
    if "rope_theta" in nested.fields:
        raise CheckpointError(
            f"{nested.source} has 'rope_theta', expected one object each for {SLIDING} and {FULL}"
        )
    fields = nested.get(kind, dict, {})
    # Files of transformers 4: `rope_scaling` was for full attention alone.
    if kind == FULL:
        fields = fields | text.get("rope_scaling", dict, {})
    old_key, default = THETA[kind]
    theta = text.get(old_key, float, default)
    settings = ConfigReader(fields, f"{text.source}: rope of {kind}")
    return rope_of(settings, text, head_dim, theta=theta)
