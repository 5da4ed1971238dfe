"""How weights are stored that are not plain numbers: 8-bit floats with scales. Torch-free.

Three spellings of the hub say it: `fp8` (DeepSeek, Qwen), `compressed-tensors` (vLLM's) and
`modelopt` (NVIDIA's). Which tensors are stored so is not read from them, but from the files.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from engine.errors import CheckpointError
from engine.model_configs.config_reader import ConfigReader
from engine.model_files import read_object

SECTION: Final = "quantization_config"
OWN_FILE: Final = "hf_quant_config.json"
UNUSED_SCALES: Final = r"[._](input|output|activation|q|k|v|kv|prob|softmax)_scale$"
"""Names of scales of activations and of K/V: neither is quantized here."""
ADVICE: Final = "use the checkpoint in bfloat16, or one in 8-bit floats"


@dataclass(slots=True, frozen=True)
class Float8Config:
    """8-bit floats times float scales.

    `block`: rows and columns of a matrix that share a scale; None: a matrix, or each of its rows,
    has its own.
    """

    block: tuple[int, int] | None = None


def with_quantization(reader: ConfigReader, folder: Path) -> ConfigReader:
    """config.json of `folder`, and what `hf_quant_config.json` adds to it where it says nothing.

    Raises CheckpointError when that file is not a JSON object.
    """
    if reader.fields.get(SECTION) is not None:
        return reader
    own = read_object(folder / OWN_FILE)
    if own is None:
        return reader
    return ConfigReader(
        {**reader.fields, SECTION: {"quant_method": "modelopt", **own}}, reader.source
    )


def read_quantization(reader: ConfigReader) -> Float8Config | None:
    """Reads `quantization_config`; None: weights are plain numbers.

    Raises CheckpointError for all but 8-bit floats.
    """
    if reader.get(SECTION, dict, None) is None:
        return None
    settings = reader.section(SECTION)
    method = settings.require("quant_method", str)
    if method not in METHODS:
        raise _refused(settings, "quant_method", method)
    return METHODS[method](settings)


def _refused(settings: ConfigReader, key: str, value: object) -> CheckpointError:
    return CheckpointError(f"{settings.source}: {key!r} {value!r} is not supported; {ADVICE}")


def _block(settings: ConfigReader, key: str) -> tuple[int, int] | None:
    """Two positive numbers, or nothing."""
    sizes = settings.get(key, list, None)
    if sizes is None:
        return None
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise CheckpointError(f"{settings.source}: {key!r} is {sizes!r}, expected rows and columns")
    rows, columns = sizes
    return rows, columns


def _fp8(settings: ConfigReader) -> Float8Config:
    """transformers' finegrained_fp8: `weight_block_size`, or one scale for each matrix."""
    return Float8Config(_block(settings, "weight_block_size"))


def _compressed_tensors(settings: ConfigReader) -> Float8Config:
    """Groups of modules; all of them must be stored alike."""
    form = settings.require("format", str)
    if form != "float-quantized":
        raise _refused(settings, "format", form)
    sparsity = settings.get("sparsity_config", dict, {})
    if sparsity.get("format", "dense") != "dense":
        raise _refused(settings, "sparsity_config", sparsity)
    if settings.get("transform_config", dict, {}):
        raise _refused(settings, "transform_config", settings.fields["transform_config"])
    groups = settings.section("config_groups")
    found = {_group(groups.section(name).section("weights")) for name in groups.fields}
    if len(found) != 1:
        raise _refused(groups, "block_structure", sorted(map(str, found)))
    return found.pop()


def _group(weights: ConfigReader) -> Float8Config:
    stored = weights.require("num_bits", int), weights.require("type", str)
    if stored != (8, "float"):
        raise _refused(weights, "num_bits", stored)
    strategy = weights.require("strategy", str)
    if strategy not in ("tensor", "channel", "block"):
        raise _refused(weights, "strategy", strategy)
    if not weights.get("symmetric", bool, True):
        raise _refused(weights, "symmetric", False)
    if strategy != "block":
        return Float8Config()
    weights.require("block_structure", list)
    return Float8Config(_block(weights, "block_structure"))


def _modelopt(settings: ConfigReader) -> Float8Config:
    """`quantization` stands alone in its own file, and its fields stand in config.json."""
    if settings.fields.get("quantization") is not None:
        settings = settings.section("quantization")
    algorithm = settings.require("quant_algo", str)
    if algorithm not in ("FP8", "FP8_PER_CHANNEL_PER_TOKEN"):
        raise _refused(settings, "quant_algo", algorithm)
    return Float8Config()


METHODS: Final[Mapping[str, Callable[[ConfigReader], Float8Config]]] = MappingProxyType(
    {"fp8": _fp8, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt}
)
