"""Settings of Gemma 3 text models, bare or inside the vision-language wrapper. Torch-free.

Hub files leave out what equals the class defaults of transformers, so every field has its default.
"""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import AttentionConfig
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.model_config import MLPConfig, ModelConfig
from engine.model_configs.rope import RopeConfig, require_rope_type

SLIDING = "sliding_attention"
FULL = "full_attention"
SLIDING_WINDOW_PATTERN = 6
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


def read(reader: ConfigReader, dtype: str | None = None) -> ModelConfig:
    """Reads config.json; `dtype` overrides the file's. Raises CheckpointError if unsupported."""
    reader.reject_quantization()
    text = reader.section("text_config") if "text_config" in reader.fields else reader
    _check(text)
    full = _attention(text)
    window = text.get("sliding_window", int, 4096)
    local_rope = _rope(text, SLIDING, full.head_dim)
    mixers = {FULL: (full,), SLIDING: (replace(full, rope=local_rope, window=window),)}
    tied = text.get("tie_word_embeddings", bool, True)
    return ModelConfig(
        family="gemma3",
        vocab_size=text.get("vocab_size", int, 262_208),
        hidden_size=text.get("hidden_size", int, 2304),
        max_position_embeddings=text.get("max_position_embeddings", int, 131_072),
        tie_word_embeddings=reader.get("tie_word_embeddings", bool, tied),
        rms_norm_eps=text.get("rms_norm_eps", float, 1e-6),
        dtype=text.compute_dtype(dtype or reader.get("dtype", str, _old_dtype(reader))),
        mixers=tuple(mixers[kind] for kind in _layer_types(text)),
        mlp=MLPConfig(intermediate_size=text.get("intermediate_size", int, 9216)),
        norm_offset=1.0,
        logit_softcap=text.get("final_logit_softcapping", float, None),
    )


def _check(text: ConfigReader) -> None:
    text.reject_quantization()
    text.require_one_of("model_type", ["gemma3_text"])
    text.require_one_of("hidden_activation", ["gelu_pytorch_tanh"])
    text.require_one_of("attention_bias", [False])
    text.require_one_of("attn_logit_softcapping", [])
    text.require_one_of("use_bidirectional_attention", [False])
    if text.get("sliding_window", int, 1) < 1:
        raise CheckpointError(f"{text.source}: 'sliding_window' must be positive")
    if text.get("final_logit_softcapping", float, 1.0) <= 0.0:
        raise CheckpointError(f"{text.source}: 'final_logit_softcapping' must be positive")


def _old_dtype(reader: ConfigReader) -> str | None:
    found: str | None = reader.get("torch_dtype", str, None)
    return found


def _attention(text: ConfigReader) -> AttentionConfig:
    """The settings of full-attention layers."""
    heads = text.get("num_attention_heads", int, 8)
    kv_heads = text.get("num_key_value_heads", int, 4)
    text.require_divisor(("num_attention_heads", heads), ("num_key_value_heads", kv_heads))
    scalar: float = text.get("query_pre_attn_scalar", float, 256.0)
    if scalar <= 0.0:
        raise CheckpointError(f"{text.source}: 'query_pre_attn_scalar' is {scalar}, not positive")
    head_dim = text.get("head_dim", int, 256)
    return AttentionConfig(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        scale=scalar**-0.5,
        rope=_rope(text, FULL, head_dim),
        qk_norm=True,
    )


def _layer_types(text: ConfigReader) -> tuple[str, ...]:
    count = text.get("num_hidden_layers", int, 26)
    pattern = text.get("sliding_window_pattern", int, SLIDING_WINDOW_PATTERN)
    default = [SLIDING if (layer + 1) % pattern else FULL for layer in range(count)]
    types = tuple(text.get("layer_types", list, default))
    if len(types) != count or not all(kind in (SLIDING, FULL) for kind in types):
        raise CheckpointError(
            f"{text.source}: 'layer_types' {types!r} must name {count} layers, "
            f"each {SLIDING!r} or {FULL!r}"
        )
    return types


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
    old_key, default = _OLD_THETA[kind]
    settings = ConfigReader(fields, f"{text.source}: rope of {kind}")
    linear = require_rope_type(settings, ["default", "linear"]) == "linear"
    factor = settings.require("factor", float) if linear else 1.0
    if factor <= 0.0:
        raise CheckpointError(f"{settings.source}: 'factor' is {factor}, not positive")
    theta = settings.get("rope_theta", float, text.get(old_key, float, default))
    return RopeConfig(theta, head_dim, factor)


_OLD_THETA = {
    FULL: ("rope_theta", GLOBAL_THETA),
    SLIDING: ("rope_local_base_freq", LOCAL_THETA),
}
