"""Gemma 3 text against transformers in float32: same files, same logits, same greedy tokens."""

import json
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from transformers import Gemma3Config, Gemma3TextConfig

from tests.ops.parity import COMMON, Case, ParityTests

SLIDING, FULL = "sliding_attention", "full_attention"
GEMMA = COMMON | {"head_dim": 16, "query_pre_attn_scalar": 24}
# Linear rope in the full layers only, a softcap, untied, one K/V head, a tiny window.
STRETCHED = GEMMA | {
    "num_key_value_heads": 1,
    "head_dim": 32,
    "tie_word_embeddings": False,
    "num_hidden_layers": 4,
    "sliding_window": 5,
    "layer_types": [FULL, SLIDING, SLIDING, FULL],
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 5e3},
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 2e5},
    },
    "final_logit_softcapping": 3.0,
}
# No full layer at all, a window wider than a prefill tile.
LOCAL_ONLY = GEMMA | {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-3,
    "num_hidden_layers": 3,
    "sliding_window": 130,
    "layer_types": [SLIDING] * 3,
}


def wrapped() -> Gemma3Config:
    text = GEMMA | {"num_hidden_layers": 4, "sliding_window": 16}
    text["layer_types"] = [SLIDING, FULL] * 2
    vision: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    marks = {"boi_token_index": 90, "eoi_token_index": 91, "image_token_index": 92}
    return Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **marks)


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
    LONG: ClassVar = ("local-only",)
    CASES: ClassVar = {
        # The hub's pattern of layers, a window that is no multiple of a block.
        "plain": Case(
            Gemma3TextConfig(**GEMMA, num_hidden_layers=6, sliding_window=37),
            spell_the_old_way,
            seed=6,
            embed=0.01,
        ),
        "stretched": Case(Gemma3TextConfig(**STRETCHED)),
        "local-only": Case(Gemma3TextConfig(**LOCAL_ONLY), seed=17, embed=0.01),
        "wrapped": Case(wrapped(), name_as_on_the_hub, seed=9, embed=0.01),
    }
