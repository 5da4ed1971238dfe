"""A model of every family for the speed benchmarks: 8 million parameters, with experts up to 16.

Knows no engine.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import transformers

Make = Callable[[], Any]
CONTEXT = 4096
SHARED = MappingProxyType(
    {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
)
LAYERS = 8
_ONE_IN_FOUR = [*["linear_attention"] * 3, "full_attention"] * 2
_CONV = [*["conv"] * 3, "full_attention"] * 2
_GATED_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": LAYERS,
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    }
)
_MAMBA2: Mapping[str, Any] = MappingProxyType(
    {"mamba_n_heads": 8, "mamba_d_head": 64, "mamba_d_state": 64, "mamba_n_groups": 1}
)
# Eight experts, of which a token takes two.
_EXPERTS: Mapping[str, Any] = MappingProxyType(
    {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 192}
)
# What has its own names, or no head_dim.
_PLAIN: Mapping[str, Any] = MappingProxyType(
    {key: value for key, value in SHARED.items() if key != "head_dim"}
)


def _gdn() -> Any:
    """Qwen3.5: six gated delta net layers and two attention layers, each with a gated MLP."""
    return transformers.Qwen3_5TextConfig(**_GATED_DELTA, **SHARED)


def _mamba2() -> Any:
    """Nemotron-H: six Mamba2, two attention and eight MLP layers."""
    return _nemotron_h("mlp")


def _qwen3() -> Any:
    """Attention and an MLP in every layer."""
    return transformers.Qwen3Config(num_hidden_layers=LAYERS, **SHARED)


def _qwen3_moe() -> Any:
    """Attention and experts in every layer."""
    return transformers.Qwen3MoeConfig(num_hidden_layers=LAYERS, **_EXPERTS, **SHARED)


def _qwen3_next() -> Any:
    """`gdn` with packed projections, and experts beside a shared one."""
    return transformers.Qwen3NextConfig(
        shared_expert_intermediate_size=192, **_GATED_DELTA, **_EXPERTS, **SHARED
    )


def _qwen3_5_moe() -> Any:
    """`gdn` with experts beside a shared one."""
    return transformers.Qwen3_5MoeTextConfig(
        shared_expert_intermediate_size=192, **_GATED_DELTA, **_EXPERTS, **SHARED
    )


def _nemotron_h_moe() -> Any:
    """`mamba2` with experts in place of the MLPs."""
    return _nemotron_h(
        "moe",
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=256,
        moe_shared_expert_intermediate_size=256,
    )


def _nemotron_h(feed_forward: str, **own: int) -> Any:
    """A mixer, then `feed_forward`, eight times."""
    mixers = ["mamba", "mamba", "mamba", "attention"] * 2
    blocks = [kind for mixer in mixers for kind in (mixer, feed_forward)]
    return transformers.NemotronHConfig(
        layers_block_type=blocks,
        num_hidden_layers=len(blocks),
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=64,
        n_groups=1,
        **own,
        **SHARED,
    )


def _granite_moe() -> Any:
    """Six Mamba2 and two attention layers, each with experts beside an MLP."""
    return transformers.GraniteMoeHybridConfig(
        num_hidden_layers=LAYERS,
        layer_types=["mamba", "mamba", "mamba", "attention"] * 2,
        num_local_experts=8,
        num_experts_per_tok=2,
        shared_intermediate_size=256,
        **_MAMBA2,
        **{**_PLAIN, "intermediate_size": 192},
    )


def _falcon_h1() -> Any:
    """Attention beside Mamba2 in every layer."""
    return transformers.FalconH1Config(num_hidden_layers=6, mamba_d_ssm=512, **_MAMBA2, **SHARED)


def _bamba() -> Any:
    """Six Mamba2 and two attention layers, each with an MLP."""
    return transformers.BambaConfig(
        num_hidden_layers=LAYERS, attn_layer_indices=[3, 7], **_MAMBA2, **_PLAIN
    )


def _gemma3() -> Any:
    """Six layers with a window of 512 tokens and two with full attention."""
    return transformers.Gemma3TextConfig(
        num_hidden_layers=LAYERS,
        sliding_window=512,
        layer_types=[*["sliding_attention"] * 3, "full_attention"] * 2,
        **SHARED,
    )


def _lfm2() -> Any:
    """Six gated short convolutions and two attention layers, each with an MLP."""
    return transformers.Lfm2Config(
        num_hidden_layers=LAYERS, layer_types=_CONV, block_auto_adjust_ff_dim=False, **_PLAIN
    )


def _lfm2_moe() -> Any:
    """`lfm2` with experts after the first two layers."""
    return transformers.Lfm2MoeConfig(
        num_hidden_layers=LAYERS, layer_types=_CONV, num_dense_layers=2, **_EXPERTS, **_PLAIN
    )


def _minimax() -> Any:
    """Six lightning attention and two attention layers, each with experts."""
    return transformers.MiniMaxConfig(
        num_hidden_layers=LAYERS,
        layer_types=_ONE_IN_FOUR,
        num_local_experts=8,
        num_experts_per_tok=2,
        **{**SHARED, "intermediate_size": 192},
    )


def _kimi_linear() -> Any:
    """Six Kimi delta attention and two latent attention layers; experts after the first layer."""
    return transformers.KimiLinearConfig(
        num_hidden_layers=LAYERS,
        layer_types=_ONE_IN_FOUR,
        linear_num_heads=4,
        linear_head_dim=64,
        kv_lora_rank=128,
        qk_nope_head_dim=64,
        qk_rope_head_dim=32,
        v_head_dim=64,
        num_local_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=192,
        **{**_PLAIN, "num_key_value_heads": 4, "bos_token_id": 1},
    )


def _olmo_hybrid() -> Any:
    """`gdn` with norms after its attention layers, which have no positions."""
    rope = {"rope_theta": None, "rope_type": "default"}
    return transformers.OlmoHybridConfig(**_GATED_DELTA, rope_parameters=rope, **_PLAIN)


def _jamba() -> Any:
    """Six Mamba1 and two attention layers; every second one has experts, the others an MLP."""
    return transformers.JambaConfig(
        num_hidden_layers=LAYERS,
        attn_layer_period=4,
        attn_layer_offset=3,
        num_experts=4,
        num_experts_per_tok=2,
        **{**_PLAIN, "intermediate_size": 384},
    )


FAMILIES: Mapping[str, Make] = MappingProxyType(
    {
        "gdn": _gdn,
        "mamba2": _mamba2,
        "qwen3": _qwen3,
        "qwen3_moe": _qwen3_moe,
        "qwen3_next": _qwen3_next,
        "qwen3_5_moe": _qwen3_5_moe,
        "nemotron_h_moe": _nemotron_h_moe,
        "granite_moe": _granite_moe,
        "falcon_h1": _falcon_h1,
        "bamba": _bamba,
        "gemma3": _gemma3,
        "lfm2": _lfm2,
        "lfm2_moe": _lfm2_moe,
        "minimax": _minimax,
        "kimi_linear": _kimi_linear,
        "olmo_hybrid": _olmo_hybrid,
        "jamba": _jamba,
    }
)
