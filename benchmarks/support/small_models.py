"""A small random model of every family: a few thousand parameters, each of which shows.

For tests, and for `benchmarks.gpu`, which compares a device with a CPU. Knows no engine.
"""

from collections.abc import Mapping
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

VOCABULARY = 512
_SHARED = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "eos_token_id": 1,
    }
)


def configs(context: int) -> dict[str, PretrainedConfig]:
    """By family, a model that has every kind of its layers and `context` positions."""
    both = {**_SHARED, "max_position_embeddings": context}
    shared = {**both, "head_dim": 32}
    return {
        "qwen3": transformers.Qwen3Config(num_hidden_layers=3, **shared),
        "nemotron_h": transformers.NemotronHConfig(
            layers_block_type=["mamba", "mlp", "attention", "mamba", "moe"],
            num_hidden_layers=5,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            moe_shared_expert_intermediate_size=48,
            mamba_num_heads=8,
            mamba_head_dim=16,
            ssm_state_size=16,
            n_groups=2,
            time_step_min=1e-9,  # transformers clamps steps by it, the models' own code does not
            **shared,
        ),
        "gemma3": transformers.Gemma3TextConfig(
            num_hidden_layers=4,
            sliding_window=40,
            layer_types=["sliding_attention", "full_attention"] * 2,
            **shared,
        ),
        "granitemoehybrid": transformers.GraniteMoeHybridConfig(
            num_hidden_layers=4,
            layer_types=["mamba", "attention"] * 2,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=96,
            mamba_n_heads=8,
            mamba_d_state=16,
            **both,
        ),
        "falcon_h1": transformers.FalconH1Config(
            num_hidden_layers=3, mamba_d_ssm=96, mamba_n_heads=6, mamba_d_state=16, **shared
        ),
        "bamba": transformers.BambaConfig(
            num_hidden_layers=4,
            attn_layer_indices=[1, 3],
            mamba_d_head=16,
            mamba_n_heads=8,
            mamba_d_state=16,
            **both,
        ),
        **_with_delta_nets(shared),
        **_with_other_states(both),
    }


def _with_delta_nets(shared: Mapping[str, Any]) -> dict[str, PretrainedConfig]:
    """Qwen's gated delta nets, without and with experts."""
    both = {
        **shared,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    }
    experts = {
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
    }
    return {
        "qwen3_5": transformers.Qwen3_5TextConfig(**both),
        "qwen3_5_moe": transformers.Qwen3_5MoeTextConfig(**both, **experts),
        "qwen3_next": transformers.Qwen3NextConfig(**both, **experts),
    }


def _with_other_states(both: Mapping[str, Any]) -> dict[str, PretrainedConfig]:
    """Kinds of states and of layers that the others lack."""
    return {
        "lfm2": transformers.Lfm2Config(
            num_hidden_layers=5,
            layer_types=["conv", "conv", "full_attention", "conv", "full_attention"],
            block_auto_adjust_ff_dim=False,
            **both,
        ),
        "lfm2_moe": transformers.Lfm2MoeConfig(
            num_hidden_layers=4,
            layer_types=["conv", "full_attention"] * 2,
            num_dense_layers=1,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=48,
            **both,
        ),
        "minimax": transformers.MiniMaxConfig(
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            num_local_experts=4,
            full_attn_alpha_factor=1.5,
            linear_attn_alpha_factor=1.5,
            mlp_alpha_factor=1.5,
            **both,
        ),
        "kimi_linear": transformers.KimiLinearConfig(
            num_hidden_layers=4,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_heads=3,
            linear_head_dim=16,
            kv_lora_rank=40,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            **{**both, "num_key_value_heads": 4, "pad_token_id": 0, "bos_token_id": 1},
        ),
        "jamba": transformers.JambaConfig(
            num_hidden_layers=4,
            attn_layer_period=3,
            attn_layer_offset=1,
            num_experts=4,
            pad_token_id=None,
            **both,
        ),
        "olmo_hybrid": transformers.OlmoHybridConfig(
            num_hidden_layers=4,
            rope_parameters={"rope_theta": None, "rope_type": "default"},
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=12,
            pad_token_id=None,
            **both,
        ),
    }


def widen(model: PreTrainedModel, seed: int, *, embed: float = 0.1) -> PreTrainedModel:
    """Draws all weights anew, with norms, decays and biases spread so that a missing one shows.

    `embed`: the size of embeddings; small, or a model with tied ones would only repeat its input.
    """
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        # Corrections of routers are buffers, and zero.
        buffers = (own for own in model.named_buffers() if own[0].endswith("bias"))
        for name, weight in chain(model.named_parameters(), buffers):
            wide = spread(name, weight, draw)
            # LFM2's last norm is called `embedding_norm`.
            is_table = "embed" in name and "norm" not in name
            weight.copy_(embed * wide if is_table else wide)
    return model.eval()


def spread(name: str, weight: Tensor, draw: torch.Generator) -> Tensor:
    """`weight` drawn anew, on the scale that its name asks for."""
    noise = torch.randn(weight.shape, generator=draw, device=weight.device)
    leaf = name.rsplit(".", 2)[-2 if name.endswith(("weight", "bias")) else -1]
    if leaf == "A_log":
        return torch.rand(weight.shape, generator=draw, device=weight.device).mul_(8.0).sub_(6.0)
    if leaf == "dt_bias" or name.endswith("bias"):
        return noise
    if leaf == "D" or "norm" in leaf:
        return weight + 0.4 * noise
    if leaf == "conv1d":
        return 0.5 * noise
    return noise if "embed" in leaf else noise * weight.shape[-1] ** -0.5
