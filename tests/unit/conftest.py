"""Fixtures of more than one unit-test file."""

from pathlib import Path

import pytest

from tests.api_double import write_model_folder


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """File name to content of a small real tokenizer with a chat template."""
    folder: Path = write_model_folder(tmp_path_factory.mktemp("tiny"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}
