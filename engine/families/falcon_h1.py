"""Falcon-H1: attention and Mamba2 side by side in every layer, many multipliers.

They are folded into weights, except where embeddings are looked up and at the logits.
"""

from dataclasses import replace

from engine.families.bamba import NORMS, RENAMES
from engine.model_configs.attention import read_attention
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.feed_forward import read_mlp
from engine.model_configs.model_config import ModelConfig, decoder_layer, read_model
from engine.model_configs.recurrent import Gating, Mamba2Config, read_mamba2


def read(reader: ConfigReader) -> ModelConfig:
    """Reads config.json. Raises CheckpointError if unsupported."""
    reader.require_one_of("hidden_act", ["silu"])
    reader.require_one_of("mamba_use_mlp", [True])
    reader.require_one_of("partial_rotary_factor", [1.0])
    attention = read_attention(reader, rotary=1.0)
    attention = replace(
        attention,
        # Keys are multiplied by it before they are rotated; scores can be, just as well.
        scale=attention.scale * reader.get("key_multiplier", float, 1.0),
        input_scale=reader.get("attention_in_multiplier", float, 1.0),
        output_scale=reader.get("attention_out_multiplier", float, 1.0),
    )
    both = (("self_attn", attention), ("mamba", _mamba(reader)))
    gate, output = reader.numbers("mlp_multipliers", 2, 1.0)
    mlp = replace(read_mlp(reader), gate_scale=gate, output_scale=output)
    layer = decoder_layer(both, [("feed_forward", mlp)], norms=NORMS)
    return read_model(
        reader,
        positions=8192,
        eps=1e-5,
        layers=(layer,) * reader.num_layers,
        renames=RENAMES,
        embedding_scale=reader.get("embedding_multiplier", float, 1.0),
        logits_scale=reader.get("lm_head_multiplier", float, 1.0),
    )


def _mamba(reader: ConfigReader) -> Mamba2Config:
    expanded = "mamba_d_ssm" in reader.fields and reader.fields["mamba_d_ssm"] is None
    return replace(
        read_mamba2(reader, None if expanded else "mamba_d_ssm"),
        out_proj_bias=reader.get("projectors_bias", bool, False),
        gating=_gating(reader),
        input_scale=reader.get("ssm_in_multiplier", float, 1.0),
        projected_scales=reader.numbers("ssm_multipliers", 5, 1.0),
        output_scale=reader.get("ssm_out_multiplier", float, 1.0),
    )


def _gating(reader: ConfigReader) -> Gating:
    if not reader.get("mamba_rms_norm", bool, False):
        return Gating.GATE_ONLY
    if reader.get("mamba_norm_before_gate", bool, True):
        return Gating.NORM_THEN_GATE
    return Gating.GATE_THEN_NORM
