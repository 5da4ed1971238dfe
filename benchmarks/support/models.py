"""The random checkpoints of the speed benchmarks, 8 to 16 million parameters or 98, in float32.

Random weights cost the same arithmetic as trained ones. Knows no engine.
`python -m benchmarks.support.models NAME FOLDER` saves one, with the demo's tokenizer, for servers
of any make.
"""

import benchmarks.support.without_fla  # noqa: F401  # isort: skip
import shutil
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
import typer
from safetensors import safe_open

from benchmarks.support.family_models import CONTEXT, FAMILIES, SHARED, Make
from benchmarks.support.large_models import LARGE
from benchmarks.support.model_folders import DEMO_MODEL


def _wide() -> Any:
    """Qwen3.5 of four gated delta net and four attention layers with much K/V.

    32 KiB per token in float32: as many bytes as Qwen3.5-4B has in bfloat16.
    """
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 256}
    return transformers.Qwen3_5TextConfig(
        num_hidden_layers=8,
        layer_types=["linear_attention", "full_attention"] * 4,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        **{**SHARED, **heads, "max_position_embeddings": 2 * CONTEXT},
    )


def _peer() -> Any:
    """Nemotron-H that other servers serve too: "M-M-M*M-M*M-", chunks of 64.

    As many tokens as its tokenizer has: vLLM 0.32 shows wrong text for ids beyond it.
    """
    blocks = [{"M": "mamba", "-": "mlp", "*": "attention"}[one] for one in "M-M-M*M-M*M-"]
    return transformers.NemotronHConfig(
        layers_block_type=blocks,
        num_hidden_layers=len(blocks),
        mamba_num_heads=8,
        mamba_head_dim=64,
        ssm_state_size=64,
        n_groups=1,
        chunk_size=64,
        **{**SHARED, "vocab_size": 832, "tie_word_embeddings": False},
    )


def _peer_attention() -> Any:
    """Qwen3 for the same servers, with attention in all of its layers."""
    sizes = {**SHARED, "vocab_size": 832, "tie_word_embeddings": False}
    return transformers.Qwen3Config(num_hidden_layers=6, **sizes)


# Two kinds of state: a delta rule's, and Mamba2's.
MODELS = ("gdn", "mamba2")
WIDE, PEER, PEER_ATTENTION = "wide", "peer", "peer_attention"
CONFIGS: Mapping[str, Make] = MappingProxyType(
    {**FAMILIES, **LARGE, WIDE: _wide, PEER: _peer, PEER_ATTENTION: _peer_attention}
)


def save_random(name: str, folder: Path) -> Path:
    """A random checkpoint of CONFIGS[name] in `folder`/`name`, as transformers saves it."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name]())
    model.float().save_pretrained(folder / name)
    return folder / name


def add_tokenizer(folder: Path) -> None:
    """Puts the demo's tokenizer into a checkpoint, for programs that load none without."""
    for file in DEMO_MODEL.glob("*token*"):
        shutil.copy(file, folder)


def load_reference(folder: Path) -> Any:
    """The transformers model of a checkpoint, float32, ready to generate."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def weight_bytes(model: Any) -> int:
    """Bytes of all parameters, tied ones once: what one decode step has to read."""
    return sum(parameter.nbytes for parameter in model.parameters())


def count_parameters(folder: Path) -> int:
    """Numbers in the files of a checkpoint, where tied weights stand once."""
    count = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            count += sum(
                prod(tensors.get_slice(name).get_shape()) for name in tensors.offset_keys()
            )
    return count


def random_prompts(
    count: int, length: int, seed: int, *, vocabulary: int = SHARED["vocab_size"]
) -> list[list[int]]:
    """`count` prompts of `length` random token ids that are neither padding nor end of text."""
    draw = torch.Generator().manual_seed(seed)
    tokens: list[list[int]] = torch.randint(2, vocabulary, (count, length), generator=draw).tolist()
    return tokens


def main(name: str, folder: Path) -> None:
    """Saves the checkpoint NAME in FOLDER/NAME, and prints where it is."""
    if name not in CONFIGS:
        raise typer.BadParameter(f"{name!r} is none of {', '.join(CONFIGS)}")
    saved = save_random(name, folder)
    add_tokenizer(saved)
    typer.echo(saved)


if __name__ == "__main__":
    typer.run(main)
