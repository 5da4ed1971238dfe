"""Fixtures of tests with doubles of other engines' workers."""

import pytest

from proxy import canary, warming
from tests.support.workers.worker_double import write_foreign_model


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Canaries come at once."""
    monkeypatch.setattr(warming, "SWEEP_S", 0.02)
    monkeypatch.setattr(warming, "MIN_PAUSE_S", 0.05)
    monkeypatch.setattr(warming, "MAX_PAUSE_S", 0.1)
    monkeypatch.setattr(canary, "COUNT_PAUSE_S", 0.01)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of the model that the doubles name."""
    return write_foreign_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["vllm", "sglang"])
def backend(request: pytest.FixtureRequest) -> str:
    """The engine of the workers."""
    return str(request.param)
