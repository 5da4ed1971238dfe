"""LFM2 against transformers in float32: same files, logits and greedy tokens."""

import json
from pathlib import Path
from typing import ClassVar

from transformers import Lfm2Config

from tests.ops.parity import COMMON, ROPE, Case, ParityTests

CONV, ATTENTION = "conv", "full_attention"
LFM2 = COMMON | {
    "num_hidden_layers": 5,
    "layer_types": [CONV, CONV, ATTENTION, CONV, ATTENTION],
    "block_multiple_of": 24,
    "block_ffn_dim_multiplier": 1.2,
    "tie_word_embeddings": False,
}
# Odd sizes, biases, a longer kernel; the MLP as wide as the file says.
BIASED = LFM2 | {
    "hidden_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "conv_bias": True,
    "conv_L_cache": 5,
    "norm_eps": 1e-3,
    "block_auto_adjust_ff_dim": False,
    "rope_parameters": ROPE,
    "tie_word_embeddings": True,
}


def spell_as_in_2025(folder: Path) -> None:
    """As the first files on the hub: attention by index, names of their own, no nested rope."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    kinds = fields.pop("layer_types")
    fields["full_attn_idxs"] = [layer for layer, kind in enumerate(kinds) if kind == ATTENTION]
    fields["rope_theta"] = fields.pop("rope_parameters")["rope_theta"]
    fields["block_ff_dim"] = fields.pop("intermediate_size")
    fields["tie_embedding"] = fields.pop("tie_word_embeddings")
    path.write_text(json.dumps(fields))


class TestLfm2(ParityTests):
    CASES: ClassVar = {
        "adjusted": Case(Lfm2Config(**LFM2), spell_as_in_2025),
        "biased": Case(Lfm2Config(**BIASED), seed=12, embed=0.02),
    }
