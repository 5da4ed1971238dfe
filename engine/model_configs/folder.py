"""The folder of a model's files: a local one, or the hub's cache. Torch-free."""

from pathlib import Path

from engine.distribution import how_to_install
from engine.errors import CheckpointError

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
