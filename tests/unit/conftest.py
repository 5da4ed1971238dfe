"""Fixtures of more than one unit-test file."""

from pathlib import Path

import pytest

from serving.api.served_model import ServedModel
from tests.support.api.api_double import TEXT, tiny_serving, tiny_tokenizer, write_model_folder


@pytest.fixture(scope="session")
def tiny_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """File name to content of a small real tokenizer with a chat template."""
    folder: Path = write_model_folder(tmp_path_factory.mktemp("tiny"))
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A served model of one small tokenizer, without an engine, as the module's SERVING says."""
    changes = getattr(request.module, "SERVING", {})
    return tiny_serving(tiny_tokenizer(tmp_path_factory.mktemp("model")), **changes)


@pytest.fixture
def ids(served: ServedModel) -> tuple[int, ...]:
    """Token ids of `TEXT`."""
    return served.tokenizer.encode(TEXT, add_special_tokens=False)
