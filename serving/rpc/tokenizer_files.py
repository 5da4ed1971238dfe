"""Files of a model folder that a node sends: a proxy has the same tokenizer and template.

For workers of other engines, which send none, the proxy reads them where it is itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from engine.errors import CheckpointError, UnavailableError
from engine.model_files import read_bytes, read_object, resolve_folder
from serving.rpc.messages import TEMPLATE_FILES, TOKENIZER_FILES

MAX_SENT_BYTES: Final = 63 * 2**20
"""In all: a reply of 64 MiB is the largest that is taken."""


def tokenizer_files(folder: Path, chat_template: str | None) -> dict[str, bytes]:
    """File name to content of those that are there.

    `chat_template`, a text, goes instead of all templates of the folder. Raises CheckpointError
    for files that cannot be read, or are too large to be sent.
    """
    read = {name: read_bytes(folder / name) for name in TOKENIZER_FILES}
    if chat_template is not None:
        given = {TEMPLATE_FILES[0]: chat_template.encode()}
        read |= dict.fromkeys(TEMPLATE_FILES) | given
    files = {name: content for name, content in read.items() if content is not None}
    if (total := sum(map(len, files.values()))) > MAX_SENT_BYTES:
        raise CheckpointError(
            f"{folder}: the tokenizer's files have {total} bytes, and no proxy takes more than "
            f"{MAX_SENT_BYTES}"
        )
    return files


@dataclass(slots=True, frozen=True)
class ModelFiles:
    """Tokenizer files by name, and the number of token ids that the model knows."""

    files: Mapping[str, bytes]
    vocab_size: int


def read_model_files(model: str) -> ModelFiles:
    """Of a folder or a hub name. Raises UnavailableError, with the option that helps."""
    try:
        folder = resolve_folder(model)
        vocab_size = _vocab_size(read_object(folder / "config.json") or {})
        files = tokenizer_files(folder, None)
    except CheckpointError as error:
        raise UnavailableError(f"{error}: give --tokenizer FOLDER") from error
    if not vocab_size:
        raise UnavailableError(f"{folder}/config.json has no vocab_size: give --tokenizer FOLDER")
    return ModelFiles(files, vocab_size)


def _vocab_size(config: Mapping[str, Any]) -> int:
    for part in (config, config.get("text_config")):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if isinstance(size, int) and size > 0:
            return size
    return 0
