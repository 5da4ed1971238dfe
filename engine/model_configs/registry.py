"""Which architectures are supported, and reading config.json as one of them. Torch-free."""

from collections.abc import Callable, Mapping
from math import inf
from pathlib import Path
from types import MappingProxyType

from engine.errors import CheckpointError
from engine.model_configs.bamba import BambaConfig
from engine.model_configs.base import ConfigReader, ModelConfig
from engine.model_configs.falcon_h1 import FalconH1Config
from engine.model_configs.gemma3 import Gemma3Config
from engine.model_configs.granite_moe_hybrid import GraniteMoeHybridConfig
from engine.model_configs.nemotron_h import NemotronHConfig
from engine.model_configs.qwen3 import Qwen3Config
from engine.model_configs.qwen3_5 import Qwen3_5Config

FromReader = Callable[[ConfigReader, str | None], ModelConfig]

CONFIGS: Mapping[str, FromReader] = MappingProxyType(
    {
        "Qwen3ForCausalLM": Qwen3Config.from_reader,
        "Qwen3_5ForCausalLM": Qwen3_5Config.from_reader,
        "Qwen3_5ForConditionalGeneration": Qwen3_5Config.from_reader,
        "NemotronHForCausalLM": NemotronHConfig.from_reader,
        "Gemma3ForCausalLM": Gemma3Config.from_reader,
        "Gemma3ForConditionalGeneration": Gemma3Config.from_reader,
        "GraniteMoeHybridForCausalLM": GraniteMoeHybridConfig.from_reader,
        "FalconH1ForCausalLM": FalconH1Config.from_reader,
        "BambaForCausalLM": BambaConfig.from_reader,
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
        if name in CONFIGS:
            return CONFIGS[name](reader, dtype)
    raise CheckpointError(
        f"{reader.source}: architectures {names!r} are not supported; "
        f"supported: {', '.join(sorted(CONFIGS))}"
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
