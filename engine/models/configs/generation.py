"""What a model folder says about generation: end ids, default sampling values. Torch-free."""

import json
from dataclasses import dataclass
from pathlib import Path

from engine.errors import CheckpointError
from engine.models.configs.base import ConfigReader


@dataclass(slots=True, frozen=True, kw_only=True)
class GenerationDefaults:
    """Values a request gets when it does not name its own; None where the folder says nothing."""

    eos_token_ids: tuple[int, ...] = ()
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None


def read_generation_config(folder: Path) -> GenerationDefaults:
    """From generation_config.json; end-of-sequence ids else come from config.json.

    As in vLLM, sampling values count whether or not the file says `do_sample`. Raises
    CheckpointError for broken files and mistyped values.
    """
    config = ConfigReader.from_folder(folder)
    reader = _generation_reader(folder)
    return GenerationDefaults(
        eos_token_ids=_eos(reader) or _eos(config) or _eos(_text_config(config)),
        temperature=reader.get("temperature", float, None),
        top_p=reader.get("top_p", float, None),
        top_k=reader.get("top_k", int, None),
        min_p=reader.get("min_p", float, None),
        repetition_penalty=reader.get("repetition_penalty", float, None),
        max_new_tokens=reader.get("max_new_tokens", int, None),
    )


def _generation_reader(folder: Path) -> ConfigReader:
    path = folder / "generation_config.json"
    if not path.exists():
        return ConfigReader({}, str(path))
    try:
        fields = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path} holds a {type(fields).__name__}, not an object")
    return ConfigReader(fields, str(path))


def _text_config(config: ConfigReader) -> ConfigReader:
    """The text part of a vision-language wrapper, or the config itself."""
    return config.section("text_config") if config.fields.get("text_config") else config


def _eos(reader: ConfigReader) -> tuple[int, ...]:
    """`eos_token_id` as a tuple: it may be missing, one id or a list of ids."""
    value = reader.fields.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) for token in ids):
        raise CheckpointError(
            f"{reader.source}: 'eos_token_id' is {value!r}, expected one id or a list of ids"
        )
    return tuple(ids)
