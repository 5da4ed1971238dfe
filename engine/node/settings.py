"""Flags over file over defaults, as one NodeConfig."""

from pathlib import Path
from typing import Any

from engine.config import NodeConfig, decode_config, parse_json_object, read_flags_file
from engine.errors import ConfigError

JSON_FLAGS = ("kv_transfer_config", "kv_events_config")


def node_config(flags: dict[str, Any], file: Path | None, defaults: dict[str, Any]) -> NodeConfig:
    """The config of one node; `flags` that are None were not given.

    Raises ConfigError naming the file or flag, the key and the value.
    """
    given = {key: value for key, value in flags.items() if value is not None}
    for key in JSON_FLAGS:
        if key in given:
            given[key] = parse_json_object(given[key], _flag(key))
    fields = {**defaults, **(read_flags_file(file) if file else {}), **given}
    if not fields.get("model"):
        raise ConfigError("no model: give a folder or hub name as first argument")
    return decode_config(fields, NodeConfig, str(file) if file else "flags")


def _flag(key: str) -> str:
    return "--" + key.replace("_", "-")
