"""The chat templates of a model folder, and the one that a server's option gives instead."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from engine.errors import CheckpointError, ConfigError
from engine.model_files import read_object, read_text
from serving.api.chat_template import ChatTemplate
from serving.config import ContentFormat

MAX_TEMPLATE_BYTES: Final = 1 << 20
TEMPLATE_FILE: Final = "chat_template.jinja"
TOOLS_FILE: Final = "additional_chat_templates/tool_use.jinja"
DEFAULT_FILE: Final = "additional_chat_templates/default.jinja"
DEFAULT: Final = "default"
TOOL_USE: Final = "tool_use"
_OF_JINJA: Final = frozenset("{}\n")


def template_sources(folder: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """Templates by name: `default`, and `tool_use` for requests that offer tools.

    As in transformers files of their own go before tokenizer_config.json. chat_template.json, which
    processors have, comes last. Raises CheckpointError for broken files.
    """
    of_files = {
        name: text
        for name, file in (
            (DEFAULT, TEMPLATE_FILE),
            (DEFAULT, DEFAULT_FILE),
            (TOOL_USE, TOOLS_FILE),
        )
        if (text := read_text(folder / file, MAX_TEMPLATE_BYTES)) is not None
    }
    if DEFAULT in of_files:
        return of_files
    of_config = _named(config.get("chat_template"))
    processor = read_object(folder / "chat_template.json") or {}
    return _named(processor.get("chat_template")) | of_config | of_files


def compile_templates(
    sources: Mapping[str, str], special_tokens: Mapping[str, str], content_format: ContentFormat
) -> dict[str, ChatTemplate]:
    """The templates that are used; raises CheckpointError for one that is not valid Jinja."""
    return {
        name: ChatTemplate(sources[name], special_tokens, content_format=content_format)
        for name in (DEFAULT, TOOL_USE)
        if name in sources
    }


def given_template(option: str | None) -> str | None:
    """The text that `--chat-template` names: a file's path, or the template itself, as in vLLM.

    Raises ConfigError for a file that cannot be read and for a text that is not valid Jinja.
    """
    if option is None:
        return None
    text = _given_text(option)
    try:
        ChatTemplate(text)
    except CheckpointError as error:
        raise ConfigError(f"--chat-template: {error}") from error
    return text


def _given_text(option: str) -> str:
    try:
        # Not every text can be a path: its names may be too long, or it may hold a NUL.
        found = read_text(Path(option), MAX_TEMPLATE_BYTES) if _may_be_path(option) else None
    except CheckpointError as error:
        if not _OF_JINJA.intersection(option):
            raise ConfigError(f"--chat-template: {error}") from error
        found = None
    if found is not None:
        return found
    if not _OF_JINJA.intersection(option):
        raise ConfigError(
            f"--chat-template {option[:200]!r} is neither a file nor a template, which has braces"
        )
    if len(option) > MAX_TEMPLATE_BYTES:
        raise ConfigError(f"--chat-template is longer than {MAX_TEMPLATE_BYTES} characters")
    return _unescaped(option)


def _may_be_path(option: str) -> bool:
    return "\0" not in option and len(os.fsencode(option)) < 4096


def _unescaped(text: str) -> str:
    r"""The text with \n and the like as the characters they stand for, as a shell cannot."""
    try:
        return text.encode("latin-1", "backslashreplace").decode("unicode_escape")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--chat-template has a broken escape: {error}") from error


def _named(entry: object) -> dict[str, str]:
    """Named templates of an entry: one text, a list of objects with names, or an object."""
    if isinstance(entry, str):
        return {DEFAULT: entry}
    if isinstance(entry, list):
        pairs = [(it.get("name"), it.get("template")) for it in entry if isinstance(it, dict)]
    else:
        pairs = list(entry.items()) if isinstance(entry, dict) else []
    return {name: text for name, text in pairs if isinstance(name, str) and isinstance(text, str)}
