"""Settings of Gemma 3 text models, bare or inside the vision-language wrapper. Torch-free.

Hub files leave out what equals the class defaults of transformers, so every field has its default.
"""

from dataclasses import dataclass
from typing import Self

from engine.errors import CheckpointError
from engine.kv_cache.spec import FullAttentionSpec, LayerSpec, SlidingWindowSpec
from engine.model_configs.base import ConfigReader, ModelConfig
from engine.model_configs.checks import (
    compute_dtype,
    reject_quantization,
    require_divisor,
    require_one_of,
)
from engine.model_configs.rope import RopeConfig, require_rope_type

SLIDING = "sliding_attention"
FULL = "full_attention"
SLIDING_WINDOW_PATTERN = 6
GLOBAL_THETA = 1_000_000.0
LOCAL_THETA = 10_000.0


@dataclass(slots=True, frozen=True, kw_only=True)
class Gemma3Config(ModelConfig):
    """Architectures Gemma3ForCausalLM and Gemma3ForConditionalGeneration (text part).

    Layers of sliding attention read the last `window` tokens and rotate by `local_rope`, the others
    read all tokens and rotate by `global_rope`. Scores are multiplied by `scale`; logits x become
    cap * tanh(x / cap) where `logit_softcap` is set.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    scale: float
    layer_types: tuple[str, ...]
    window: int
    local_rope: RopeConfig
    global_rope: RopeConfig
    logit_softcap: float | None

    @classmethod
    def from_reader(cls, reader: ConfigReader, dtype: str | None = None) -> Self:
        """Reads config.json; `dtype` overrides the file's.

        Raises CheckpointError for unsupported settings.
        """
        reject_quantization(reader)
        wrapped = "text_config" in reader.fields
        text = reader.section("text_config") if wrapped else reader
        _check(text)
        dtype = compute_dtype(text, dtype or reader.get("dtype", str, _old_dtype(reader)))
        heads, kv_heads = _heads(text)
        head_dim = text.get("head_dim", int, 256)
        layer_types = _layer_types(text)
        window = text.get("sliding_window", int, 4096)
        tied = text.get("tie_word_embeddings", bool, True)
        specs: dict[str, LayerSpec] = {
            FULL: FullAttentionSpec(kv_heads, head_dim, dtype),
            SLIDING: SlidingWindowSpec(kv_heads, head_dim, dtype, window),
        }
        return cls(
            architecture=f"Gemma3For{'ConditionalGeneration' if wrapped else 'CausalLM'}",
            vocab_size=text.get("vocab_size", int, 262_208),
            hidden_size=text.get("hidden_size", int, 2304),
            num_layers=len(layer_types),
            max_position_embeddings=text.get("max_position_embeddings", int, 131_072),
            tie_word_embeddings=reader.get("tie_word_embeddings", bool, tied),
            rms_norm_eps=text.get("rms_norm_eps", float, 1e-6),
            dtype=dtype,
            layer_specs=tuple((specs[kind],) for kind in layer_types),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=text.get("intermediate_size", int, 9216),
            scale=_scale(text),
            layer_types=layer_types,
            window=window,
            local_rope=_rope(text, SLIDING, head_dim),
            global_rope=_rope(text, FULL, head_dim),
            logit_softcap=text.get("final_logit_softcapping", float, None),
        )


def _check(text: ConfigReader) -> None:
    reject_quantization(text)
    require_one_of(text, "model_type", ["gemma3_text"])
    require_one_of(text, "hidden_activation", ["gelu_pytorch_tanh"])
    require_one_of(text, "attention_bias", [False])
    require_one_of(text, "attn_logit_softcapping", [])
    require_one_of(text, "use_bidirectional_attention", [False])
    if text.get("sliding_window", int, 1) < 1:
        raise CheckpointError(f"{text.source}: 'sliding_window' must be positive")
    if text.get("final_logit_softcapping", float, 1.0) <= 0.0:
        raise CheckpointError(f"{text.source}: 'final_logit_softcapping' must be positive")


def _old_dtype(reader: ConfigReader) -> str | None:
    found: str | None = reader.get("torch_dtype", str, None)
    return found


def _heads(text: ConfigReader) -> tuple[int, int]:
    heads = text.get("num_attention_heads", int, 8)
    kv_heads = text.get("num_key_value_heads", int, 4)
    require_divisor(text, ("num_attention_heads", heads), ("num_key_value_heads", kv_heads))
    return heads, kv_heads


def _scale(text: ConfigReader) -> float:
    scalar: float = text.get("query_pre_attn_scalar", float, 256.0)
    if scalar <= 0.0:
        raise CheckpointError(f"{text.source}: 'query_pre_attn_scalar' is {scalar}, not positive")
    return float(scalar**-0.5)


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
    """Nested by layer type in files of transformers 5; before, `rope_scaling` was for FULL only."""
    nested = ConfigReader(text.get("rope_parameters", dict, {}), f"{text.source}:rope_parameters")
    if "rope_theta" in nested.fields:
        raise CheckpointError(
            f"{nested.source} has 'rope_theta', expected one object each for {SLIDING} and {FULL}"
        )
    fields = nested.get(kind, dict, {})
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
