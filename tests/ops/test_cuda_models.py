"""Whole models of the CUDA column's kernels, in Triton's interpreter, beside torch's operators.

As on a device: the host asks for no number while a step is launched, decodes run one step ahead,
and recordings have rows of padding. Only that a recording is one call is left to a device.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from benchmarks.support import interpreter
from benchmarks.support.small_models import configs, widen
from engine.compute_config import ComputeConfig
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.models import loader
from engine.ops.backend import cuda_ops
from engine.step import SchedulerOutput
from engine.types import FinishReason, SamplingParams
from engine.worker.model_runner import StepResults
from tests.support.api.api_double import write_model_folder
from tests.support.host_access import no_host_access
from tests.support.nodes.bare_engine import BareEngine
from tests.support.nodes.cluster import (
    Cluster,
    Generation,
    checkpoints,
    close_all,
    transfer_config,
)
from tests.support.nodes.hand_over_checks import check_tokens_and_logprobs
from tests.support.nodes.pairs import prompt_of, request_of

CPU = torch.device("cpu")
Watch = Callable[[], AbstractContextManager[None]]
__all__ = ["checkpoints"]


@dataclass
class Again:
    """A recorder for a CPU: a replay runs the pass once more, to the same place."""

    takes_padding: bool = True
    why_not: str = ""

    @dataclass
    class Pass:
        run: Callable[[], Tensor]
        result: Tensor

        def replay(self) -> None:
            self.result.copy_(self.run())

    def record(self, run: Callable[[], Tensor]) -> tuple[Pass, Tensor]:
        result = run()
        return self.Pass(run, result), result


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One gated delta net and one layer of attention: the interpreter takes its time."""
    folder = tmp_path_factory.mktemp("short")
    config = configs(1024)["qwen3_5"]
    config.num_hidden_layers, config.layer_types = 2, ["linear_attention", "full_attention"]
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    widen(model, seed=7).save_pretrained(folder)
    return folder


def test_tokens_are_those_of_torch(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(short, monkeypatch)


@pytest.mark.long
@pytest.mark.parametrize(
    "family", ["gemma3", "jamba", "kimi_linear", "lfm2_moe", "minimax", "nemotron_h"]
)
def test_tokens_of_other_layers_are_those_of_torch(
    family: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of Kimi's delta rule fla reads lengths, which are on the host also beside a device.
    watch = nullcontext if family == "kimi_linear" else no_host_access
    check(checkpoints[family], monkeypatch, watch=watch)


@pytest.mark.long
def test_tokens_of_recordings_without_padding(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a CPU: a recording for each number of rows, and no step ahead."""
    # The sampler of a CPU reads the numbers that it has at hand.
    check(short, monkeypatch, takes_padding=False, watch=nullcontext)


@pytest.mark.long
def test_a_hand_over_equals_one_node(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit-equal: where P stops D goes on, with the same kernels and a step ahead."""
    interpreter.patch(partial(monkeypatch.setattr, raising=False))
    column = replace(cuda_ops(), recorder=Again())
    monkeypatch.setattr(loader, "ops_for", lambda *_, **__: column)

    async def run() -> None:
        cluster, folder = Cluster([]), write_model_folder(short)
        try:
            p, d = await cluster.pair(folder, transfer_config("zmq"), max_num_seqs=2)
            await check_tokens_and_logprobs(p, d, [70])
        finally:
            await close_all(cluster.nodes)

    asyncio.run(run())


def check(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    takes_padding: bool = True,
    watch: Watch = no_host_access,
) -> None:
    """Several prompts at once, one with a stop, one with drawn tokens, and a next turn."""
    interpreter.patch(partial(monkeypatch.setattr, raising=False))
    free, _ = generate(folder, ComputeConfig(kernels="torch"), stop=())
    # The third token of the first request ends it, while the others go on.
    stop = tuple(free[0].token_ids[2:3])
    expected, _ = generate(folder, ComputeConfig(kernels="torch"), stop=stop)
    column = replace(cuda_ops(), recorder=Again(takes_padding))
    monkeypatch.setattr(loader, "ops_for", lambda *_, **__: column)
    found, num_ahead = generate(folder, ComputeConfig(), stop=stop, watch=watch)
    assert (num_ahead >= 4) is takes_padding
    assert expected[0].last.finish_reason is FinishReason.STOP
    for one, other in zip(found, expected, strict=True):
        assert one.token_ids == other.token_ids
        assert one.last.finish_reason == other.last.finish_reason
        values = [[token.logprob for token in each.logprobs] for each in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


def generate(
    folder: Path, compute: ComputeConfig, *, stop: tuple[int, ...], watch: Watch = nullcontext
) -> tuple[list[Generation], int]:
    """Answers, and the number of steps that ran ahead."""
    config = read_config(folder, None)
    model = loader.load_model(folder, config, CPU, compute=compute)
    num_ahead = 0
    with BareEngine(model, plan_arena(config.groups, 16, 4 << 20)) as engine:
        launch = engine.runner.launch

        def watched(output: SchedulerOutput) -> StepResults:
            nonlocal num_ahead
            num_ahead += any(item.is_ahead for item in output.scheduled)
            with watch():
                return launch(output)

        engine.runner.launch = watched  # type: ignore[method-assign]
        greedy = SamplingParams(max_tokens=4, temperature=0.0, logprobs=1, stop_token_ids=stop)
        drawn = SamplingParams(max_tokens=5, temperature=0.8, top_p=0.9, seed=5, logprobs=1)
        answers = engine.generate(
            request_of(prompt_of(5), greedy), request_of(prompt_of(18, salt=1), drawn)
        )
        turn = (*prompt_of(5), *answers[0].token_ids, 7)
        answers += engine.generate(request_of(turn, SamplingParams(max_tokens=1, logprobs=1)))
    return answers, num_ahead
