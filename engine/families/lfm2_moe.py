"""LFM2-MoE: LFM2 whose layers have experts, except the first few."""

from dataclasses import replace

from engine.families.lfm2 import read_layers, with_defaults
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import ExpertsConfig, Scoring, read_mlp, read_router
from engine.model_configs.model_config import ModelConfig, NamedPart, Renames

RENAMES: Renames = ((r"\.expert_bias$", ".gate.e_score_correction_bias"),)


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader = with_defaults(reader)
    router = read_router(
        reader,
        "num_experts",
        scoring=Scoring.SIGMOID,
        renormalise=reader.get("norm_topk_prob", bool, True),
        floor=1e-6,
        correction_bias=reader.get("use_expert_bias", bool, True),
        scale=reader.get("routed_scaling_factor", float, 1.0),
    )
    experts = ExpertsConfig(router=router, intermediate_size=reader.size("moe_intermediate_size"))
    dense: NamedPart = ("feed_forward", read_mlp(reader))
    sparse: NamedPart = ("feed_forward", experts)
    first = reader.count("num_dense_layers", 2)
    count = reader.num_layers
    model = read_layers(reader, [dense if layer < first else sparse for layer in range(count)])
    return replace(model, renames=(*model.renames, *RENAMES))
