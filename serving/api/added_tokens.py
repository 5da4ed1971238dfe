"""Tokens that a model folder names beside its tokenizer.json, added as `transformers` adds them.

Source: `TokenizersBackend` of transformers 5. Ids are not free: tokens go to the end of the
vocabulary, so files that put one elsewhere contradict each other and are refused.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import tokenizers
from tokenizers import AddedToken

from engine.errors import CheckpointError
from engine.model_files import read_object

STANDARD_NAMES: Final = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens(
    core: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]
) -> dict[str, str]:
    """Completes `core` with what the files of `folder` add; returns the named special tokens.

    `config` is tokenizer_config.json. With an `added_tokens_decoder` it says all; older folders
    have special_tokens_map.json and added_tokens.json instead, as transformers reads them. Raises
    CheckpointError for broken files and for ids that differ between them.
    """
    explicit, extra = _model_specific(config)
    fields = {key: value for key, value in config.items() if key not in explicit}
    if "added_tokens_decoder" in config:
        declared = _decoder_of(config["added_tokens_decoder"])
        known = declared
    else:
        older = read_object(folder / "special_tokens_map.json") or {}
        _merge_map(older, fields, explicit, extra=extra)
        special = {_content(fields[key]) for key in STANDARD_NAMES if fields.get(key)}
        special |= {_content(value) for value in extra}
        declared = _legacy(read_object(folder / "added_tokens.json") or {}, special)
        known = declared | core.get_added_tokens_decoder()
    named = {key: fields[key] for key in STANDARD_NAMES if fields.get(key) is not None}
    named |= {key: value for key, value in fields.items() if _names_token(key, value)}
    named |= explicit
    by_content = {token.content: token for token in known.values()}
    tokens = {key: by_content.get(_content(it)) or _token(it) for key, it in named.items()}
    _extend(core, known, list(tokens.values()), extra=[*map(_token, extra)])
    for index, token in declared.items():
        if (actual := core.token_to_id(token.content)) != index:
            raise CheckpointError(
                f"{folder}: token {token.content!r} has id {index} in one file and {actual} by "
                "tokenizer.json: make added_tokens_decoder (or added_tokens.json) agree with it"
            )
    return {key: token.content for key, token in tokens.items()}


def _extend(
    core: tokenizers.Tokenizer,
    known: Mapping[int, AddedToken],
    named: list[AddedToken],
    *,
    extra: list[AddedToken],
) -> None:
    """Adds what `core` lacks: `known` by their ids, then those with names, then `extra` ones.

    A token that `core` has with other flags is added too, which changes them.
    """
    present = {repr(token) for token in core.get_added_tokens_decoder().values()}
    contents = {token.content for token in core.get_added_tokens_decoder().values()}
    new = [token for _, token in sorted(known.items()) if repr(token) not in present]
    contents |= {token.content for token in new}
    names = {token.content for token in named}
    for token in [*named, *extra]:
        if token.content not in contents:
            contents.add(token.content)
            new.append(token)
    for token in new:
        # A token with a name is special, whatever its entry says.
        token.special = token.special or token.content in names
    core.add_tokens(new)


def _model_specific(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Tokens with names of their own, such as `image_token`, and extra ones without."""
    explicit = {
        key: value
        for key, value in config.items()
        if _names_token(key, value) and isinstance(value, str)
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        return explicit | extra, []
    return explicit, _listed(extra, "extra_special_tokens")


def _merge_map(
    content: Mapping[str, Any],
    fields: dict[str, Any],
    explicit: dict[str, Any],
    *,
    extra: list[Any],
) -> None:
    """special_tokens_map.json over tokenizer_config.json."""
    for key, value in content.items():
        if key == "extra_special_tokens" and isinstance(value, dict):
            explicit |= value
        elif key == "extra_special_tokens":
            extra += [it for it in _listed(value, key) if it not in extra]
        elif key == "additional_special_tokens":
            extra += [] if extra else _listed(value, key)
        else:
            fields[key] = value


def _decoder_of(entry: object) -> dict[int, AddedToken]:
    if not isinstance(entry, dict):
        raise CheckpointError("tokenizer_config.json: 'added_tokens_decoder' is no object")
    found = {}
    for key, value in entry.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise CheckpointError(f"tokenizer_config.json: token id {key[:40]!r} is no number")
        found[int(key)] = _token(value, special=False)
    return found


def _legacy(content: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """added_tokens.json: text to id; what no other file calls special is not."""
    found = {}
    for text, index in content.items():
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise CheckpointError(f"added_tokens.json: the id of {text[:40]!r} is {index!r}")
        is_special = text in special
        found[index] = AddedToken(text, normalized=not is_special, special=is_special)
    return found


def _names_token(key: str, value: object) -> bool:
    is_token = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
    return key.endswith("_token") and key not in STANDARD_NAMES and is_token


def _listed(value: object, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"{key} of the tokenizer is a {type(value).__name__}, no list")
    return list(value)


def _content(value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise CheckpointError(f"the tokenizer's files have {str(value)[:80]!r} for a token's text")
    return text


def _token(value: object, *, special: bool = True) -> AddedToken:
    """A token from its text, or from an object that has its text and flags."""
    flags: dict[str, Any] = {"special": special}
    if isinstance(value, dict):
        flags |= {name: value[name] for name in _FLAGS if name in value}
    if wrong := [name for name in flags if not isinstance(flags[name], bool)]:
        raise CheckpointError(f"token {_content(value)[:40]!r}: {wrong[0]!r} is no true or false")
    return AddedToken(_content(value), **flags)
