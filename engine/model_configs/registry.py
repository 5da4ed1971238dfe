"""The supported architectures, and config.json read as one of them. Torch-free."""

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType

from engine.errors import CheckpointError
from engine.model_configs import (
    bamba,
    falcon_h1,
    gemma3,
    granite_moe_hybrid,
    nemotron_h,
    qwen3,
    qwen3_5,
)
from engine.model_configs.config_reader import ConfigReader
from engine.model_configs.model_config import ModelConfig

ARCHITECTURES: Mapping[str, Callable[[ConfigReader, str | None], ModelConfig]] = MappingProxyType(
    {
        "Qwen3ForCausalLM": qwen3.read,
        "Qwen3_5ForCausalLM": qwen3_5.read,
        "Qwen3_5ForConditionalGeneration": qwen3_5.read,
        "NemotronHForCausalLM": nemotron_h.read,
        "Gemma3ForCausalLM": gemma3.read,
        "Gemma3ForConditionalGeneration": gemma3.read,
        "GraniteMoeHybridForCausalLM": granite_moe_hybrid.read,
        "FalconH1ForCausalLM": falcon_h1.read,
        "BambaForCausalLM": bamba.read,
    }
)


def read_config(folder: Path, dtype: str | None = None, *, device: str = "cpu") -> ModelConfig:
    """The config of the model in `folder`; `dtype` overrides the compute dtype named in the file.

    `auto` is the dtype in the file, but for float16 on the CPU: CPUs multiply it several times
    slower, and the weights lose nothing in float32. Raises CheckpointError for a broken file, and
    for an architecture or setting without support.
    """
    reader = ConfigReader.from_folder(folder)
    if dtype != "auto":
        return _checked(_config_of(reader, dtype), reader.source)
    config = _checked(_config_of(reader, None), reader.source)
    if config.dtype == "float16" and device == "cpu":
        return _config_of(reader, "float32")
    return config


def _config_of(reader: ConfigReader, dtype: str | None) -> ModelConfig:
    names = reader.require("architectures", list)
    for name in names:
        if name in ARCHITECTURES:
            return ARCHITECTURES[name](reader, dtype)
    raise CheckpointError(
        f"{reader.source}: architectures {names!r} are not supported; "
        f"supported: {', '.join(sorted(ARCHITECTURES))}"
    )


def _checked(config: ModelConfig, source: str) -> ModelConfig:
    """Raises CheckpointError for numbers with which no family can compute."""
    if config.max_position_embeddings < 1:
        raise CheckpointError(
            f"{source}: 'max_position_embeddings' is {config.max_position_embeddings}, "
            "expected at least 1"
        )
    if not 0.0 <= config.rms_norm_eps < inf:
        raise CheckpointError(
            f"{source}: the norms' epsilon is {config.rms_norm_eps}, expected a small number"
        )
    return config
