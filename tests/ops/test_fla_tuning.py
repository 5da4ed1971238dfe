"""The GPU benchmark's hold on fla's tuning: what it keeps, fla finds; else it takes the first."""

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from fla.modules.norm import l2norm
from fla.ops.utils import cache
from triton import Config
from triton.runtime.autotuner import Autotuner

from benchmarks.gpu import tuning

KEY = (128, 1, "torch.bfloat16")


def tuner_of(kernel: Any) -> Any:
    """The tuner around a kernel."""
    while not isinstance(kernel, cache.CachedAutotuner):
        kernel = kernel.fn
    return kernel


def test_kept_configurations_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gc.freeze()  # as a node does when it starts
    tuner = tuner_of(l2norm.l2norm_fwd_kernel)
    monkeypatch.setattr(tuner, "cache", {KEY: Config({"BT": 32}, num_warps=2, num_stages=3)})
    assert tuning.save(tmp_path) >= 1  # other tests of this process have tuned, too
    monkeypatch.setattr(tuner, "cache", {(64, 1, "torch.bfloat16"): Config({"BT": 8})})
    tuning.save(tmp_path)
    monkeypatch.setattr(cache, "FLA_CACHE_MODE", cache.FlaCacheMode.STRICT)
    monkeypatch.setenv("FLA_CONFIG_DIR", str(tmp_path))
    found = cache.load_cached_config(tuner.kernel_name, cache.AutotuneKey(KEY))
    assert (found["kwargs"], found["num_warps"], found["num_stages"]) == ({"BT": 32}, 2, 3)
    assert cache.load_cached_config(tuner.kernel_name, cache.AutotuneKey((1, 1, "a"))) is None


def test_the_first_configuration_that_runs_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one is refused, and after the second one nothing is measured."""
    asked: list[Config] = []

    def bench(_: Any, *__: Any, config: Config, **___: Any) -> list[float]:
        asked.append(config)
        return [float("inf") if len(asked) == 1 else 1.0] * 3

    tuner = tuner_of(l2norm.l2norm_fwd_kernel)
    monkeypatch.setattr(Autotuner, "_bench", bench)
    monkeypatch.setattr(tuner, "cache", {})
    tuning.take_the_first()
    x = torch.randn(2, 3, 4)
    l2norm.l2norm_fwd(x)
    assert len(asked) == 2
    assert list(tuner.cache.values()) == [asked[1]]
