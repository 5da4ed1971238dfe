"""The config.json of a published model, small enough to compute: all of its keys, fewer layers.

Channels are divided by 32, heads by 4, channels of a head by 8, so what has to fit still fits.
Channels stay multiples of 4, which the grouped products of transformers' experts need.
"""

import json
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

VOCABULARY = 128
LAYERS = 8
# Tokens below it are never special.
PLAIN = 64
CHANNELS, HEADS, HEAD_CHANNELS, EXPERTS = 32, 4, 8, 8
DIVISORS: Mapping[str, int] = MappingProxyType(
    {
        "hidden_size": CHANNELS,
        "intermediate_size": CHANNELS,
        "moe_intermediate_size": CHANNELS,
        "shared_intermediate_size": CHANNELS,
        "shared_expert_intermediate_size": CHANNELS,
        "moe_shared_expert_intermediate_size": CHANNELS,
        "moe_latent_size": CHANNELS,
        "mamba_d_ssm": CHANNELS,
        "mamba_dt_rank": CHANNELS,
        "block_dim": CHANNELS,
        "block_ff_dim": CHANNELS,
        "block_multiple_of": CHANNELS,
        "conv_dim": CHANNELS,
        "conv_dim_out": CHANNELS,
        "kv_lora_rank": CHANNELS,
        "out_hidden_size": CHANNELS,
        "sliding_window": CHANNELS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "num_heads": HEADS,
        # Then all channels of a head are rotated: transformers ignores the key.
        "rotary_dim": HEADS,
        "linear_num_key_heads": HEADS,
        "linear_num_value_heads": HEADS,
        "mamba_num_heads": HEADS,
        "mamba_n_heads": HEADS,
        "head_dim": HEAD_CHANNELS,
        "qk_nope_head_dim": HEAD_CHANNELS,
        "qk_rope_head_dim": HEAD_CHANNELS,
        "v_head_dim": HEAD_CHANNELS,
        "linear_key_head_dim": HEAD_CHANNELS,
        "linear_value_head_dim": HEAD_CHANNELS,
        "mamba_head_dim": HEAD_CHANNELS,
        "mamba_d_head": HEAD_CHANNELS,
        "ssm_state_size": HEAD_CHANNELS,
        "mamba_d_state": HEAD_CHANNELS,
        "num_experts": EXPERTS,
        "num_local_experts": EXPERTS,
        "n_routed_experts": EXPERTS,
    }
)
# One entry or character per layer.
PER_LAYER = ("layer_types", "hybrid_override_pattern")
# Layers by number, which count from this one.
NUMBERED = {"full_attn_idxs": 0, "full_attn_layers": 1, "kda_layers": 1}


def shrunk(fields: dict[str, Any]) -> dict[str, Any]:
    """A config.json of the same keys, whose model has a few thousand parameters."""
    small = {key: _shrunk(key, value) for key, value in fields.items()}
    if "text_config" in fields:
        small["text_config"] = shrunk(fields["text_config"])
    elif "vision_config" not in fields:
        small["vocab_size"] = VOCABULARY
    return small


def _shrunk(key: str, value: Any) -> Any:
    if isinstance(value, dict):
        return {own: _shrunk(own, inner) for own, inner in value.items()}
    if key in ("num_hidden_layers", "depth"):
        return min(value, LAYERS)
    if key in PER_LAYER:
        return value[:LAYERS]
    if key in NUMBERED and value:
        return [layer for layer in value if layer - NUMBERED[key] < LAYERS]
    if key.endswith(("token_id", "token_index")):
        return json.loads(json.dumps(value), parse_int=lambda one: PLAIN + int(one) % PLAIN)
    if key == "mrope_section":
        return [part // HEAD_CHANNELS for part in value]
    if key not in DIVISORS or not value:
        return value
    if DIVISORS[key] == CHANNELS:
        return -(-value // (4 * CHANNELS)) * 4
    return max(1, value // DIVISORS[key])
