"""The supported architectures, and config.json read as one of them. Torch-free.

A family is one file here: `read`, from a config.json to a `ModelConfig` that names the parts of
every layer and their tensors. `engine/models/hybrid.py` builds any.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from types import MappingProxyType

from engine.errors import CheckpointError
from engine.families import (
    bamba,
    falcon_h1,
    gemma3,
    granite_moe_hybrid,
    jamba,
    kimi_linear,
    lfm2,
    lfm2_moe,
    minimax,
    nemotron_h,
    olmo_hybrid,
    qwen,
)
from engine.kv_cache.spec import DTYPE_BYTES
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.model_config import DTYPE_KEYS, ModelConfig
from engine.model_configs.quantization import with_quantization
from engine.safetensors_headers import main_dtype, read_headers

ARCHITECTURES: Mapping[str, Callable[[ConfigReader], ModelConfig]] = MappingProxyType(
    {
        "Qwen3ForCausalLM": qwen.read_qwen3,
        "Qwen3MoeForCausalLM": qwen.read_qwen3,
        "Qwen3NextForCausalLM": qwen.read_qwen3_5,
        "Qwen3_5ForCausalLM": qwen.read_qwen3_5,
        "Qwen3_5ForConditionalGeneration": qwen.read_qwen3_5,
        "Qwen3_5MoeForCausalLM": qwen.read_qwen3_5,
        "Qwen3_5MoeForConditionalGeneration": qwen.read_qwen3_5,
        "NemotronHForCausalLM": nemotron_h.read,
        "Gemma3ForCausalLM": gemma3.read,
        "Gemma3ForConditionalGeneration": gemma3.read,
        "GraniteMoeHybridForCausalLM": granite_moe_hybrid.read,
        "FalconH1ForCausalLM": falcon_h1.read,
        "BambaForCausalLM": bamba.read,
        "Lfm2ForCausalLM": lfm2.read,
        "Lfm2MoeForCausalLM": lfm2_moe.read,
        "MiniMaxForCausalLM": minimax.read,
        "KimiLinearForCausalLM": kimi_linear.read,
        "OlmoHybridForCausalLM": olmo_hybrid.read,
        "JambaForCausalLM": jamba.read,
    }
)


def read_config(folder: Path, dtype: str | None = None, *, device: str = "cpu") -> ModelConfig:
    """The config of the model in `folder`; `dtype` overrides the compute dtype named in the file.

    `auto` is the dtype in the file. On the CPU float16 becomes float32: CPUs multiply it several
    times slower, and the weights lose nothing. 8-bit floats are computed in bfloat16. A file that
    names no dtype means float32; on a device, the one that most weights are stored in. Raises
    CheckpointError for a broken file, and for an architecture or setting without support.
    """
    reader = with_quantization(ConfigReader.from_folder(folder), folder)
    names_none = all(reader.text_part().fields.get(key) is None for key in DTYPE_KEYS)
    if dtype == "auto" and device != "cpu" and names_none:
        # A card has room for a model of 16 bits, and often none for twice as much.
        dtype = main_dtype(read_headers(folder)) or dtype
    return config_of(reader, dtype, device=device)


def config_of(reader: ConfigReader, dtype: str | None, *, device: str = "cpu") -> ModelConfig:
    """As `read_config`, from a config.json that is read already."""
    names = reader.require("architectures", list)
    read = next((ARCHITECTURES[name] for name in map(str, names) if name in ARCHITECTURES), None)
    if read is None:
        raise CheckpointError(
            f"{reader.source}: architectures {names!r} are not supported; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}"
        )
    config = read(reader)
    if dtype == "auto":
        dtype = "float32" if config.dtype == "float16" and device == "cpu" else None
        if config.dtype.startswith("float8"):
            dtype = "bfloat16"
    config = replace(config, dtype=dtype or config.dtype)
    _check(config, reader.source)
    return config


def _check(config: ModelConfig, source: str) -> None:
    """Raises CheckpointError for what no family can compute with."""
    if config.dtype not in DTYPE_BYTES:
        options = ", ".join(DTYPE_BYTES)
        raise CheckpointError(f"{source}: dtype {config.dtype!r} is not one of {options}")
    if not 0.0 <= config.rms_norm_eps < inf:
        raise CheckpointError(
            f"{source}: the norms' epsilon is {config.rms_norm_eps}, expected a small number"
        )
