"""Kimi Linear: Kimi delta attention, and latent attention now and then; an MLP, then experts.

config.json and tensors are named as on the hub or as transformers 5 has them.
"""

from dataclasses import replace

from engine.errors import CheckpointError
from engine.model_configs.attention import FULL, read_latent_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, read_mlp, read_sigmoid_router
from engine.model_configs.model_config import (
    ModelConfig,
    NamedPart,
    Renames,
    decoder_layer,
    read_model,
)
from engine.model_configs.recurrent import read_kimi_delta_attention

LINEAR = "linear_attention"
DENSE, SPARSE = "dense", "sparse"
# The hub's names of settings, which transformers 5 saves too, to DeepSeek-V3's and common ones.
ALIASES = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}
RENAMES: Renames = (
    (r"\.self_attn\.forget_gate\.", ".self_attn."),
    (r"\.block_sparse_moe\.", ".mlp."),
    (r"\.w1\.weight$", ".gate_proj.weight"),
    (r"\.w3\.weight$", ".up_proj.weight"),
    (r"\.w2\.weight$", ".down_proj.weight"),
)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    fields = {ALIASES.get(key, key): value for key, value in reader.fields.items()}
    reader = ConfigReader(fields, reader.source)
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("mla_use_nope", [True])
    reader.require_one_of("moe_router_activation_func", ["sigmoid"])
    reader.require_one_of("use_grouped_topk", [True])
    mixers: dict[str, NamedPart] = {
        LINEAR: ("self_attn", read_kimi_delta_attention(reader)),
        FULL: ("self_attn", read_latent_attention(reader)),
    }
    layers = zip(_mixers(reader), _feed_forward(reader), strict=True)
    return read_model(
        reader,
        positions=1_048_576,
        eps=1e-5,
        layers=tuple(decoder_layer([mixers[kind]], own) for kind, own in layers),
        renames=RENAMES,
    )


def _mixers(reader: ConfigReader) -> tuple[str, ...]:
    """The kind of each layer's mixer: `layer_types`, else the hub's lists, which count from 1."""
    nested = reader.get("linear_attn_config", dict, {})
    lists = ConfigReader(nested, f"{reader.source}:linear_attn_config")
    full, linear = (lists.get(key, list, []) for key in ("full_attn_layers", "kda_layers"))
    every = list(range(1, 1 + reader.num_layers))
    named_once = len(full + linear) == len(every) and all(
        (layer in full) != (layer in linear) for layer in every
    )
    if (full or linear) and not named_once:
        raise CheckpointError(
            f"{lists.source}: 'full_attn_layers' {full!r} and 'kda_layers' {linear!r} must name "
            f"each layer from 1 to {len(every)} once"
        )
    default = [FULL if layer in full else LINEAR for layer in every]
    return reader.layer_types(default if full or linear else [], (LINEAR, FULL))


def _feed_forward(reader: ConfigReader) -> list[list[NamedPart]]:
    """The parts of each layer: an MLP, or experts beside the shared ones, which are one MLP."""
    mlp = read_mlp(reader)
    size = reader.size("moe_intermediate_size")
    experts = ExpertsConfig(
        router=read_sigmoid_router(reader, "num_experts"), intermediate_size=size
    )
    shared = replace(mlp, intermediate_size=size * reader.count("n_shared_experts", 1))
    parts: dict[str, list[NamedPart]] = {DENSE: [("mlp", mlp)], SPARSE: [("mlp", experts)]}
    if shared.intermediate_size:
        parts[SPARSE].append(("mlp.shared_experts", shared))
    first = reader.count("first_k_dense_replace", 1)
    every = reader.size("moe_layer_freq", 1)
    layers = range(reader.num_layers)
    default = [DENSE if layer < first or layer % every else SPARSE for layer in layers]
    types = reader.layer_types(default, tuple(parts), key="mlp_layer_types")
    return [parts[kind] for kind in types]
