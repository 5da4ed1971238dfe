"""Reading config.json without torch: typed fields, clear errors, what every family must tell.

Knows no family; `engine/models/registry.py` maps architecture names to families.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.kv_cache.spec import (
    AttentionSpec,
    KVCacheGroup,
    LayerSpec,
    MambaSpec,
    form_groups,
)


@dataclass(slots=True, frozen=True, kw_only=True)
class ModelConfig:
    """What engine and planner need of any family; each family extends it with its own numbers.

    `layer_specs[i]` lists what layer i keeps in the cache; `dtype` is the compute dtype ("float32",
    ...).
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    dtype: str
    layer_specs: tuple[tuple[LayerSpec, ...], ...]

    @property
    def groups(self) -> tuple[KVCacheGroup, ...]:
        """KV cache groups of the model, in order of first appearance."""
        return form_groups(self.layer_specs)

    def group_of(self, layer: int, kind: type[AttentionSpec] | type[MambaSpec]) -> int:
        """The KV cache group of what `layer` keeps of `kind`; a layer may keep one of each."""
        return next(
            number
            for number, group in enumerate(self.groups)
            if layer in group.layers and isinstance(group.spec, kind)
        )


class ConfigReader:
    """Typed access to one JSON object; every error names the file's key and the value found."""

    def __init__(self, fields: dict[str, Any], source: str) -> None:
        self.fields = fields
        self.source = source

    @classmethod
    def from_folder(cls, folder: Path) -> "ConfigReader":
        """Reads `folder`/config.json; raises CheckpointError when it is not a JSON object."""
        return cls.from_file(folder / "config.json")

    @classmethod
    def from_file(cls, path: Path) -> "ConfigReader":
        """Reads one file; raises CheckpointError when it is not a JSON object."""
        try:
            fields = json.loads(path.read_text())
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} does not exist; give a Hugging Face model folder"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise CheckpointError(f"{path} is not JSON: {error}") from error
        except RecursionError:
            raise CheckpointError(f"{path} is nested too deeply") from None
        if not isinstance(fields, dict):
            raise CheckpointError(f"{path} holds a {type(fields).__name__}, not an object")
        return cls(fields, str(path))

    def section(self, key: str) -> "ConfigReader":
        """The nested object `key` (for example `text_config` of a vision-language wrapper)."""
        return ConfigReader(self.require(key, dict), f"{self.source}:{key}")

    def require(self, key: str, kind: type) -> Any:
        """The value of `key`, which must be there and of type `kind`."""
        if self.fields.get(key) is None:
            raise CheckpointError(f"{self.source} has no {key!r}")
        return self._typed(key, self.fields[key], kind)

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of `key` when it is there and not null, else `default`."""
        value = self.fields.get(key)
        return default if value is None else self._typed(key, value, kind)

    def numbers(self, key: str, count: int, default: float) -> tuple[float, ...]:
        """The list `key` of `count` numbers, or `count` times `default` when it is not there."""
        values = self.get(key, list, [default] * count)
        if len(values) != count:
            raise CheckpointError(f"{self.source}: {key!r} is {values!r}, expected {count} numbers")
        return tuple(self._typed(key, value, float) for value in values)

    def _typed(self, key: str, value: Any, kind: type) -> Any:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if value != value:  # NaN, which Python's JSON reader takes
            raise CheckpointError(f"{self.source}: {key!r} is NaN")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.source}: {key!r} is {value!r}, expected {kind.__name__}")
        return value
