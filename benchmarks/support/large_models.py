"""Three hybrids of 98 to 99 million parameters, which no cache holds. Knows no engine.

Ten layers with states and two with attention, each with an MLP. llama.cpp loads all three
(`benchmarks/support/llama_cpp.py`).
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import transformers

from benchmarks.support.family_models import Make

# At least as many as the demo's tokenizer has.
LARGE_VOCABULARY = 1024
_SHARED: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": LARGE_VOCABULARY,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
)


def _granite() -> Any:
    """Granite 4.0 H without experts: Mamba2 with states of 32 x 128 in 48 heads."""
    return transformers.GraniteMoeHybridConfig(
        num_hidden_layers=12,
        layer_types=(["mamba"] * 5 + ["attention"]) * 2,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="nope",
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        mamba_n_groups=1,
        embedding_multiplier=12.0,
        attention_multiplier=0.015625,
        residual_multiplier=0.246,
        logits_scaling=3.0,
        **_SHARED,
    )


def _nemotron_h() -> Any:
    """The same Mamba2, and MLPs without a gate."""
    mixers = (["mamba"] * 5 + ["attention"]) * 2
    blocks = [kind for mixer in mixers for kind in (mixer, "mlp")]
    return transformers.NemotronHConfig(
        layers_block_type=blocks,
        num_hidden_layers=len(blocks),
        intermediate_size=3072,
        mamba_num_heads=48,
        mamba_head_dim=32,
        ssm_state_size=128,
        n_groups=1,
        head_dim=64,
        chunk_size=256,
        **_SHARED,
    )


def _qwen3_5() -> Any:
    """Gated delta nets with states of 128 x 128 in 12 heads."""
    return transformers.Qwen3_5TextConfig(
        num_hidden_layers=12,
        layer_types=(["linear_attention"] * 5 + ["full_attention"]) * 2,
        intermediate_size=1664,
        linear_num_key_heads=6,
        linear_num_value_heads=12,
        linear_key_head_dim=128,
        linear_value_head_dim=128,
        head_dim=64,
        **_SHARED,
    )


LARGE: Mapping[str, Make] = MappingProxyType(
    {"granite": _granite, "nemotron_h": _nemotron_h, "qwen3_5": _qwen3_5}
)
