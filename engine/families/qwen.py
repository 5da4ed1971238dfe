"""Qwen text models: a mixer, then an MLP or experts, in every layer.

Qwen3 has full attention in every layer; Qwen3-Next and Qwen3.5 have gated delta net layers with a
full-attention layer now and then, Qwen3.5 bare or inside the vision-language wrapper.
"""

from dataclasses import replace

from engine.model_configs.attention import FULL, QKNorm, read_attention, read_layer_types
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import (
    ExpertsConfig,
    MLPConfig,
    RouterConfig,
    read_mlp,
    read_router,
)
from engine.model_configs.model_config import (
    ModelConfig,
    NamedPart,
    Renames,
    decoder_layer,
    read_model,
)
from engine.model_configs.recurrent import read_gated_delta_net

LINEAR = "linear_attention"
# The parts of a wrapper, and the models themselves.
QWEN3_5 = ["qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"]
RENAMES: Renames = (
    (r"^model\.language_model\.", "model."),
    (r"\.mlp\.shared_expert_gate\.", ".mlp.shared_expert.token_gate."),
)


def read_qwen3(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("attention_bias", [False])
    reader.require_one_of("use_sliding_window", [False])
    feed_forward = _feed_forward(reader, renormalise=False)
    reader.layer_types([FULL] * len(feed_forward), [FULL])
    attention = replace(read_attention(reader, rotary=1.0), qk_norm=QKNorm.BY_HEAD)
    return read_model(
        reader,
        positions=32768,
        eps=1e-6,
        layers=tuple(decoder_layer([("self_attn", attention)], parts) for parts in feed_forward),
        renames=RENAMES,
    )


def read_qwen3_5(reader: ConfigReader) -> ModelConfig:
    """Reads config.json, of Qwen3-Next too. Raises CheckpointError if unsupported."""
    text = reader.text_part()
    text.require_one_of("model_type", QWEN3_5)
    text.require_one_of("hidden_act", ["silu"])
    text.require_one_of("attention_bias", [False])
    text.require_one_of("attn_output_gate", [True])
    text.require_one_of("output_gate_type", ["silu", "swish"])
    attention = read_attention(text, rotary=0.25)
    mixers: dict[str, NamedPart] = {
        LINEAR: ("linear_attn", read_gated_delta_net(text)),
        FULL: ("self_attn", replace(attention, qk_norm=QKNorm.BY_HEAD, gated=True)),
    }
    types = read_layer_types(text, LINEAR, key="full_attention_interval", interval=4)
    feed_forward = _feed_forward(text, renormalise=True)
    return read_model(
        text,
        positions=32768,
        eps=1e-6,
        layers=tuple(
            decoder_layer([mixers[kind]], parts)
            for kind, parts in zip(types, feed_forward, strict=True)
        ),
        renames=RENAMES,
        norm_offset=1.0,
    )


def _feed_forward(reader: ConfigReader, *, renormalise: bool) -> list[list[NamedPart]]:
    """By layer an MLP, or experts with perhaps an MLP beside them that every token takes."""
    layers = range(reader.num_layers)
    dense = set(layers)
    count = "num_experts" if "num_experts" in reader.fields else "num_local_experts"
    if reader.count(count, 0) > 0:
        step = reader.size("decoder_sparse_step", 1)
        listed = reader.get("mlp_only_layers", list, [])
        dense = {layer for layer in layers if layer in listed or (layer + 1) % step}
    parts: dict[bool, list[NamedPart]] = {}
    if dense:
        parts[True] = [("mlp", read_mlp(reader))]
    if len(dense) < len(layers):
        renormalise = reader.get("norm_topk_prob", bool, renormalise)
        parts[False] = _experts(reader, read_router(reader, count, renormalise=renormalise))
    return [parts[layer in dense] for layer in layers]


def _experts(reader: ConfigReader, router: RouterConfig) -> list[NamedPart]:
    size = reader.size("moe_intermediate_size")
    experts = ExpertsConfig(router=router, intermediate_size=size)
    shared = reader.count("shared_expert_intermediate_size", 0)
    if shared == 0:
        return [("mlp", experts)]
    beside = MLPConfig(intermediate_size=shared, token_gate=True)
    return [("mlp", experts), ("mlp.shared_expert", beside)]
