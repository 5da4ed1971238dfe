"""Files of a model folder that a node sends: a proxy has the same tokenizer and template."""

from pathlib import Path
from typing import Final

from engine.errors import CheckpointError
from engine.model_files import read_bytes
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
