"""The folder of a model, here or from the hub, and its files, read within bounds. Torch-free.

Every failure names the file.
"""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.distribution import how_to_install
from engine.errors import CheckpointError

INDEX_FILE: Final = "model.safetensors.index.json"
SINGLE_FILE: Final = "model.safetensors"

MAX_FILE_BYTES: Final = 60 * 2**20
"""Of one file beside the weights; the largest published tokenizer.json has 34 MB."""


def read_bytes(path: Path, max_bytes: int = MAX_FILE_BYTES) -> bytes | None:
    """The content of a file, None where there is none.

    Raises CheckpointError where something is there that cannot be read: other users' files, links
    that lead nowhere, folders, pipes, and files of more than `max_bytes`.
    """
    try:
        # A pipe would be waited for without O_NONBLOCK, which files do not know.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        if path.is_symlink():
            target = os.readlink(path)
            raise CheckpointError(f"{path} is a link to {target}, which is not there") from None
        return None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    try:
        kind = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(kind):
            is_folder = stat.S_ISDIR(kind)
            reason = os.strerror(errno.EISDIR) if is_folder else "it is no regular file"
            raise CheckpointError(f"{path} cannot be read: {reason}")
        with open(descriptor, "rb", closefd=False) as file:
            content = file.read(max_bytes + 1)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    finally:
        os.close(descriptor)
    if len(content) > max_bytes:
        raise CheckpointError(f"{path} is too large: at most {max_bytes} bytes are read")
    return content


def read_text(path: Path, max_bytes: int = MAX_FILE_BYTES) -> str | None:
    """As `read_bytes`, in UTF-8."""
    content = read_bytes(path, max_bytes)
    try:
        return None if content is None else content.decode()
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is not UTF-8: {error}") from error


def read_object(path: Path) -> dict[str, Any] | None:
    """As `read_text`, of a file that holds one JSON object."""
    text = read_text(path)
    if text is None:
        return None
    try:
        content = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise CheckpointError(f"{path} is nested too deeply") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that make up a model: one, or those that its index names.

    Raises CheckpointError for an index that cannot be read.
    """
    index = folder / INDEX_FILE
    content = read_bytes(index)
    if content is None:
        return [folder / SINGLE_FILE]
    try:
        weight_map = msgspec.json.decode(content, type=_ShardIndex).weight_map
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{index} has no weight_map of file names: {error}") from error
    names = sorted(set(weight_map.values()))
    # The index comes with the model: a name with slashes would read any file of this machine.
    for name in names:
        if Path(name).name != name:
            raise CheckpointError(f"{index} names a shard outside the folder: {name!r}")
    return [folder / name for name in names]


class _ShardIndex(msgspec.Struct, frozen=True):
    """The part of the index that says in which file a tensor is."""

    weight_map: dict[str, str]


# Weights only as safetensors; tokenizer and chat template in any of their files.
PATTERNS = ["*.json", "*.safetensors", "*.jinja", "*.txt", "tokenizer.model"]


def resolve_folder(model: str) -> Path:
    """The folder of `model`: the path itself when it is a folder, else a download of that hub name.

    Raises CheckpointError when it is neither, or when hub and hub cache do not have it now.
    """
    folder = Path(model).expanduser()
    try:
        is_there = folder.exists()
        if folder.is_dir():
            return folder
    except OSError as error:
        raise CheckpointError(f"model {model!r} cannot be read: {error.strerror}") from error
    if is_there or folder.is_absolute() or model.startswith((".", "~")):
        raise CheckpointError(f"model {model!r} is not a folder; give a Hugging Face model folder")
    return _download(model)


def _download(model: str) -> Path:
    try:
        # Here and not above: optional, and it costs a start-up that local folders need not pay.
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise CheckpointError(
            f"model {model!r} is not a local folder; to load hub names, {how_to_install('hub')}"
        ) from error
    try:
        return Path(snapshot_download(model, allow_patterns=PATTERNS))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"model {model!r} is not a local folder, and the hub did not give it: {error}"
        ) from error
