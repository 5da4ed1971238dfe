"""Checks that all families share: settings that this engine does not have are refused."""

from collections.abc import Collection
from typing import Any

from engine.errors import CheckpointError
from engine.kv_cache.spec import DTYPE_BYTES
from engine.model_configs.base import ConfigReader


def require_one_of(reader: ConfigReader, key: str, allowed: Collection[Any]) -> None:
    """Raises CheckpointError when `key` is there, not null, and not one of `allowed`."""
    value = reader.fields.get(key)
    if value is not None and value not in allowed:
        options = ", ".join(repr(option) for option in allowed) or "null"
        raise CheckpointError(f"{reader.source}: {key!r} is {value!r}; supported: {options}")


def require_divisor(reader: ConfigReader, whole: tuple[str, int], part: tuple[str, int]) -> None:
    """Raises CheckpointError unless `part` divides `whole`, both (key, value) and positive."""
    if part[1] < 1 or whole[1] < 1 or whole[1] % part[1]:
        raise CheckpointError(
            f"{reader.source}: {part[0]!r} {part[1]} does not divide {whole[0]!r} {whole[1]}"
        )


def reject_quantization(reader: ConfigReader) -> None:
    """Raises CheckpointError for quantized checkpoints; tensors are read as they are stored."""
    found = reader.fields.get("quantization_config")
    if found is not None:
        raise CheckpointError(f"{reader.source}: 'quantization_config' {found!r} is not supported")


def compute_dtype(reader: ConfigReader, dtype: str | None) -> str:
    """`dtype` when given, else the file's `dtype` or `torch_dtype`, else float32."""
    chosen = dtype or reader.get("dtype", str, reader.get("torch_dtype", str, "float32"))
    if chosen not in DTYPE_BYTES:
        options = ", ".join(DTYPE_BYTES)
        raise CheckpointError(f"{reader.source}: dtype {chosen!r} is not one of {options}")
    return str(chosen)
