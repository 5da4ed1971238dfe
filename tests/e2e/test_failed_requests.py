"""Failures in computing one request end that request with a typed error, and no other."""

import asyncio
import itertools
from collections.abc import Awaitable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from structlog.testing import capture_logs
from torch import Tensor

from engine.errors import EngineGenerateError
from engine.families.registry import read_config
from engine.forward import ForwardBatch, LayerCaches
from engine.kv_cache.arena_plan import plan_arena
from engine.models.loader import CausalLM, load_model
from engine.types import SamplingParams
from engine.worker.model_runner import MAX_FAILED_PASSES
from tests.support.nodes.asking import ask, question, stream, streamed_ids
from tests.support.nodes.bare_engine import BareEngine
from tests.support.nodes.cluster import Cluster, Generation, generate, sample, settled
from tests.support.nodes.pairs import FAMILIES, REMOTE_DECODE, hand_over, prompt_of, request_of
from tests.support.nodes.processes import ServedCluster
from tests.tiers import everyday

NAN = "the model produced NaN logits"
LONG = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
DRAWN = SamplingParams(max_tokens=24, temperature=0.8, seed=5, ignore_eos=True)
TINY = (
    {"temperature": 1e-310},
    {"temperature": 5e-324},
    {"temperature": 1e-9, "repetition_penalty": 5e-324},
    {"temperature": 1.0, "repetition_penalty": 1e-310},
    {"temperature": 1e-200, "repetition_penalty": 1e-200, "frequency_penalty": 2.0},
    {"temperature": 100.0, "min_p": 1.0, "top_p": 5e-324, "top_k": 1},
)


async def test_tiny_temperatures_and_penalties_are_raised_and_answered(
    served: ServedCluster,
) -> None:
    """On P, D and through both: the token of 0.01, as in vLLM."""
    for server in served.servers:
        for values in TINY:
            answer = await ask(server.url, question([5, 6, 7], seed=1, **values))
            assert len(answer.token_ids) == 10, (server.name, values)
        least = await ask(server.url, question([5, 6, 7], seed=1, temperature=0.01))
        below = await ask(server.url, question([5, 6, 7], seed=1, temperature=1e-310))
        assert below.token_ids == least.token_ids
        for penalty in (0, -1, 0.0):
            refused = await ask(server.url, question([5], repetition_penalty=penalty))
            assert refused.error(400)["param"] == "repetition_penalty"


def poisoned(model: Path, folder: Path, token: int) -> Path:
    """The same model, in which `token` as input makes everything after it NaN."""
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    (name,) = [name for name in tensors if "embed" in name and tensors[name].ndim == 2]
    assert "lm_head.weight" in tensors  # or the token's logit would be NaN for everybody
    tensors[name][token] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


async def failure(answer: Awaitable[Generation]) -> str:
    with pytest.raises(EngineGenerateError) as caught:
        await answer
    return str(caught.value)


@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5", "nemotron_h")))
async def test_nan_ends_its_own_request_only(
    family: str, cluster: Cluster, checkpoints: dict[str, Path], tmp_path: Path
) -> None:
    """In one batch, and after it in the memory that held the NaN; on P, on D and on one node."""
    healthy = await cluster.start("decode", checkpoints[family])
    good = [prompt_of(length, salt=length) for length in (5, 23, 70, 100)]
    doomed = prompt_of(60)
    expected = [
        (await generate(healthy, request_of(prompt, how))).token_ids
        for prompt, how in itertools.product(good, (LONG, DRAWN))
    ]
    fatal = (await generate(healthy, request_of(doomed, LONG))).token_ids
    seen = {token for tokens in expected for token in tokens}.union(*good, doomed)
    place, token = next((n, t) for n, t in enumerate(fatal) if t not in seen and n > 0)
    folder = poisoned(checkpoints[family], tmp_path / "poisoned", token)
    p, d = await cluster.pair(folder, served_model_name=("tiny",))
    for _ in range(2):  # the second time every block has held NaN
        bad = [(*good[2], token), (token, *good[3]), (*good[1][:9], token, *good[1])]
        good_ones = (
            generate(d, request_of(prompt, how))
            for prompt, how in itertools.product(good, (LONG, DRAWN))
        )
        failures = asyncio.gather(
            *(failure(generate(d, request_of(prompt, LONG))) for prompt in bad),
            *(failure(generate(d, request_of(prompt, DRAWN))) for prompt in bad),
            failure(hand_over(p, d, doomed, LONG)),
            failure(generate(p, request_of(bad[0], LONG, REMOTE_DECODE))),
        )
        assert [one.token_ids for one in await asyncio.gather(*good_ones)] == expected
        assert await failures == [NAN] * 8
        for node in (p, d):
            await settled(node)
    assert sample(d, "vllm:request_success_total", finished_reason="error") == 14

    error = (await ask(d.url, question(doomed, max_tokens=24))).error(500)
    assert (error["type"], error["message"]) == ("server_error", NAN)
    events = await stream(d.url, question(doomed, max_tokens=24, stream=True))
    assert streamed_ids(events) == fatal[: place + 1]
    assert events[-1]["error"]["message"] == NAN


class Stumbling:
    """A model that raises when it is given a certain token."""

    recorder = None

    def __init__(self, model: CausalLM, fatal: int) -> None:
        self._model = model
        self._fatal = fatal

    def forward(self, batch: ForwardBatch, caches: LayerCaches) -> Tensor:
        hidden = self._model.forward(batch, caches)
        if self._fatal in batch.token_ids:
            raise RuntimeError("out of memory")
        return hidden

    def logits(self, hidden_rows: Tensor) -> Tensor:
        return self._model.logits(hidden_rows)


def test_a_forward_pass_that_raises_ends_the_requests_of_its_step(
    checkpoints: dict[str, Path],
) -> None:
    """Their blocks and states are free, and what was kept for others is as good as before."""
    folder = checkpoints["nemotron_h"]
    config = read_config(folder, None)
    model = Stumbling(load_model(folder, config, torch.device("cpu")), fatal=3)
    plan = plan_arena(config.groups, 16, 8 << 20)
    prompts = [prompt_of(length, salt=length) for length in (40, 100, 101)]
    with BareEngine(model, plan) as engine:
        expected = [one.token_ids for one in engine.generate(*map(request_of, prompts))]
        decoding = engine.add(request_of(prompts[0]))
        engine.step()
        unlucky = [engine.add(request_of(prompt)) for prompt in ((3, *prompts[1]), prompts[2])]
        with capture_logs() as said:
            while engine.scheduler.has_work:
                engine.step()
        assert [entry["num_requests"] for entry in said] == [2]
        assert engine.failed.keys() == {decoding, unlucky[0]}  # the third was not yet begun
        assert "out of memory" not in str(engine.failed[decoding])  # that is for the log
        assert engine.done[unlucky[1]].token_ids == expected[2]
        again = engine.generate(*map(request_of, prompts))
        assert [one.token_ids for one in again] == expected


def test_an_engine_ends_when_every_forward_pass_raises(checkpoints: dict[str, Path]) -> None:
    folder = checkpoints["qwen3"]
    config = read_config(folder, None)
    model = Stumbling(load_model(folder, config, torch.device("cpu")), fatal=3)
    good, bad = request_of((5, 6)), request_of((5, 3))
    with (
        capture_logs(),
        pytest.raises(RuntimeError, match="out of memory"),
        BareEngine(model, plan_arena(config.groups, 16, 8 << 20)) as engine,
    ):
        for rounds in (MAX_FAILED_PASSES - 1, MAX_FAILED_PASSES):
            for _ in range(rounds):
                engine.add(bad)
                engine.step()
            assert len(engine.failed) == MAX_FAILED_PASSES - 1
            engine.generate(good)
