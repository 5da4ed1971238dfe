"""Gemma 3 text against transformers in float32: same files, same logits, same greedy tokens."""

import json
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    PreTrainedModel,
)

from tests.ops.parity import VOCAB, Case, ParityTests

SLIDING, FULL = "sliding_attention", "full_attention"
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
}


def plain() -> PreTrainedModel:
    """The hub's pattern of layers, a window that is no multiple of a block."""
    return Gemma3ForCausalLM(Gemma3TextConfig(**COMMON, num_hidden_layers=6, sliding_window=37))


def stretched() -> PreTrainedModel:
    """Linear rope in the full layers only, a softcap, untied, one K/V head, a tiny window."""
    ropes = {
        SLIDING: {"rope_type": "default", "rope_theta": 5e3},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
    }
    case = COMMON | {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **case,
            num_hidden_layers=4,
            sliding_window=5,
            layer_types=[FULL, SLIDING, SLIDING, FULL],
            rope_parameters=ropes,
            final_logit_softcapping=3.0,
        )
    )


def local_only() -> PreTrainedModel:
    """No full layer at all, a window wider than a prefill tile."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **COMMON | {"num_key_value_heads": 4, "rms_norm_eps": 1e-3},
            num_hidden_layers=3,
            sliding_window=130,
            layer_types=[SLIDING] * 3,
        )
    )


def wrapped() -> PreTrainedModel:
    text = COMMON | {
        "num_hidden_layers": 4,
        "sliding_window": 16,
        "layer_types": [SLIDING, FULL] * 2,
    }
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    config = Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=4,
        boi_token_index=90,
        eoi_token_index=91,
        image_token_index=92,
    )
    return Gemma3ForConditionalGeneration(config)


def spell_the_old_way(folder: Path) -> None:
    """Ropes at top level and a layer pattern instead of a list, as transformers 4 wrote them."""
    path = folder / "config.json"
    fields = json.loads(path.read_text())
    ropes = fields.pop("rope_parameters")
    fields["rope_theta"] = ropes[FULL]["rope_theta"]
    fields["rope_local_base_freq"] = ropes[SLIDING]["rope_theta"]
    fields["rope_scaling"] = None
    del fields["layer_types"]
    fields["sliding_window_pattern"] = 6
    fields["torch_dtype"] = fields.pop("dtype")
    path.write_text(json.dumps(fields))


def name_as_on_the_hub(folder: Path) -> None:
    path = folder / "model.safetensors"
    renamed = {}
    for name, tensor in load_file(path).items():
        tail = name.removeprefix("model.").removeprefix("language_model.")
        is_text = "language_model." in name
        renamed[f"language_model.model.{tail.removeprefix('model.')}" if is_text else tail] = tensor
    save_file(renamed, path, {"format": "pt"})


class TestGemma3(ParityTests):
    CASES: ClassVar = {
        "plain": Case(plain, spell_the_old_way, seed=6, embed=0.01),
        "stretched": Case(stretched),
        "local-only": Case(local_only, seed=17, embed=0.01),
        "wrapped": Case(wrapped, name_as_on_the_hub, seed=9, embed=0.01),
    }
