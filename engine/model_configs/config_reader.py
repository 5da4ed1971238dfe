"""Reads config.json: typed fields, clear errors, unsupported settings refused. Torch-free."""

from collections.abc import Collection, Mapping, Sequence
from math import inf, isfinite
from pathlib import Path
from typing import Any

from engine.errors import CheckpointError
from engine.model_files import read_object

# Fields of vision-language wrappers that are said of their text part too.
OF_WRAPPERS = ("dtype", "torch_dtype", "tie_word_embeddings", "quantization_config")
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 4096
"""A file of nonsense must not make lists of layers until memory ends."""


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
        fields = read_object(path)
        if fields is None:
            raise CheckpointError(f"{path} does not exist; give a Hugging Face model folder")
        return cls(fields, str(path))

    def section(self, key: str) -> "ConfigReader":
        """The nested object `key`."""
        return ConfigReader(self.require(key, dict), f"{self.source}:{key}")

    def text_part(self) -> "ConfigReader":
        """The text part of a vision-language wrapper, or all of a text model.

        The wrapper's own values of `OF_WRAPPERS` win over those of its text part.
        """
        if self.fields.get("text_config") is None:
            return self
        text = self.section("text_config")
        own = {key: self.fields[key] for key in OF_WRAPPERS if self.fields.get(key) is not None}
        return ConfigReader(text.fields | own, text.source)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigReader":
        """The same fields, and those of `defaults` that are missing or null."""
        missing = {key: it for key, it in defaults.items() if self.fields.get(key) is None}
        return ConfigReader(self.fields | missing, self.source)

    def require(self, key: str, kind: type) -> Any:
        """The value of `key`, which must be there and of type `kind`."""
        if self.fields.get(key) is None:
            raise CheckpointError(f"{self.source} has no {key!r}")
        return self._typed(key, self.fields[key], kind)

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The value of `key` when it is there and not null, else `default`."""
        value = self.fields.get(key)
        return default if value is None else self._typed(key, value, kind)

    def count(self, key: str, default: int | None = None) -> int:
        """A number from 0 to `MAX_SIZE`; it must be there if there is no `default`."""
        return self._bounded(key, default, least=0)

    def size(self, key: str, default: int | None = None) -> int:
        """As `count`, but at least 1."""
        return self._bounded(key, default)

    def optional_size(self, key: str) -> int | None:
        """As `size`; None where it is missing or null."""
        return None if self.fields.get(key) is None else self.size(key)

    @property
    def num_layers(self) -> int:
        """The number of hidden layers."""
        return self._bounded("num_hidden_layers", most=MAX_LAYERS)

    def numbers(self, key: str, count: int, default: float) -> tuple[float, ...]:
        """The list `key` of `count` numbers, or `count` times `default` when it is not there."""
        values = self.get(key, list, [default] * count)
        if len(values) != count:
            raise CheckpointError(f"{self.source}: {key!r} is {values!r}, expected {count} numbers")
        return tuple(self._typed(key, value, float) for value in values)

    def layer_types(
        self, default: Sequence[str], kinds: Sequence[str], *, key: str = "layer_types"
    ) -> tuple[str, ...]:
        """The list `key`, else `default`; one of `kinds` for each hidden layer."""
        types = tuple(self.get(key, list, default))
        count = self.num_layers
        if len(types) != count or not all(kind in kinds for kind in types):
            raise CheckpointError(
                f"{self.source}: {key!r} {types!r} must name {count} layers, "
                f"each one of {', '.join(kinds)}"
            )
        return types

    def require_one_of(self, key: str, allowed: Collection[Any]) -> None:
        """Raises CheckpointError when `key` is there, not null, and not one of `allowed`."""
        value = self.fields.get(key)
        if value is not None and value not in allowed:
            options = ", ".join(repr(option) for option in allowed) or "null"
            raise CheckpointError(f"{self.source}: {key!r} is {value!r}; supported: {options}")

    def require_divisor(self, whole: tuple[str, int], part: tuple[str, int]) -> None:
        """Raises CheckpointError unless `part` divides `whole`, both (key, value) and positive."""
        if part[1] < 1 or whole[1] < 1 or whole[1] % part[1]:
            raise CheckpointError(
                f"{self.source}: {part[0]!r} {part[1]} does not divide {whole[0]!r} {whole[1]}"
            )

    def _bounded(
        self, key: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE
    ) -> int:
        value: int = self.require(key, int) if default is None else self.get(key, int, default)
        if not least <= value <= most:
            raise CheckpointError(
                f"{self.source}: {key!r} is {value}, expected a number from {least} to {most}"
            )
        return value

    def _typed(self, key: str, value: Any, kind: type) -> Any:
        # JSON has one kind of number, Python has bool as an int: 1 is a float, True is no int.
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            value = float(value) if abs(value) <= MAX_SIZE else inf
        # Python's JSON reader takes these.
        if isinstance(value, float) and not isfinite(value):
            raise CheckpointError(f"{self.source}: {key!r} is {value}, expected a finite number")
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise CheckpointError(f"{self.source}: {key!r} is {value!r}, expected {kind.__name__}")
        return value
