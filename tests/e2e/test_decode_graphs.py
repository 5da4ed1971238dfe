"""Recorded decode steps write the bits of steps that are run kernel by kernel."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.layers import rotary
from engine.models.loader import load_model
from engine.native.recording import CHUNK_BYTES, Workspace
from engine.step import ScheduledRequest
from engine.types import SamplingParams
from engine.worker.decode_graphs import SHORTEST, DecodeGraphs
from tests.ops.native import native_kernels
from tests.support.nodes.bare_engine import BareEngine
from tests.support.nodes.pairs import prompt_of, request_of

CPU = torch.device("cpu")


class Compared:
    """A decode graph whose every pass is run once more, kernel by kernel, on the same arena."""

    def __init__(self, engine: BareEngine) -> None:
        graphs = engine.runner._graphs
        assert isinstance(graphs, DecodeGraphs)
        self.graphs = graphs
        self.batcher = engine.runner._batcher
        self.arena = engine.runner.arena.tensor
        self.replayed: set[tuple[int, int]] = set()

    def run(self, ordered: list[ScheduledRequest]) -> tuple[Tensor, Tensor] | None:
        before = self.arena.clone()
        # The recording comes first: what it needs, such as longer tables, it must make by itself.
        found = self.graphs.run(ordered)
        if found is None:
            return None
        hidden, rows = found
        written = self.arena.clone()
        self.arena.copy_(before)
        batch = self.batcher.build(ordered)
        assert torch.equal(hidden, self.graphs._forward(batch))
        assert torch.equal(rows, batch.logits_rows)
        assert torch.equal(self.arena, written)
        self.replayed |= {(rows, one.inputs.longest) for rows, one in self.graphs._graphs.items()}
        return found


@pytest.mark.parametrize("family", ["nemotron_h", "qwen3_5", "lfm2", "gemma3"])
def test_a_replay_writes_the_bits_of_its_kernels(
    family: str, checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches grow and shrink, and outgrow their recordings and the rotary tables."""
    native_kernels()
    monkeypatch.setattr(rotary, "FIRST_TABLE", SHORTEST)
    config = read_config(checkpoints[family], None)
    model = load_model(checkpoints[family], config, CPU)
    with BareEngine(model, plan_arena(config.groups, 16, 4 << 20)) as engine:
        compared = Compared(engine)
        engine.runner._graphs = compared  # type: ignore[assignment]
        lengths = ((SHORTEST - 20, 60), (5, 40), (100, 9))
        names = []
        for salt, (length, tokens) in enumerate(lengths):
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
            names.append(engine.add(request_of(prompt_of(length, salt=salt), sampling)))
            for _ in range(8):
                engine.step()
        while engine.scheduler.has_work:
            engine.step()
    assert [len(engine.done[name].token_ids) for name in names] == [60, 40, 9]
    assert {(1, SHORTEST), (2, SHORTEST), (3, SHORTEST), (1, 2 * SHORTEST)} <= compared.replayed


def test_a_pass_that_torch_takes_part_in_is_not_recorded() -> None:
    kernels = native_kernels()
    recording, result = kernels.record(lambda: kernels.empty((3,), torch.float32).fill_(2.0))
    assert recording is None
    assert kernels.why_not == "torch computes ['aten.fill_.Scalar']"
    assert result.tolist() == [2.0] * 3


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_results_that_live_share_no_bytes(data: st.DataObject) -> None:
    """And what has died is given out again: a pass takes no more than lives at once."""
    alive: list[Tensor] = []
    workspace, most = Workspace(), 0
    for _ in range(2):
        workspace.reset()
        for _ in range(data.draw(st.integers(1, 30))):
            if alive and data.draw(st.sampled_from((True, False))):
                alive.pop(data.draw(st.integers(0, len(alive) - 1)))
                continue
            size = data.draw(st.integers(0, CHUNK_BYTES // 8))
            alive.append(workspace.take((size,), torch.float32).view(-1, 1).fill_(size))
            most = max(most, sum(one.nbytes for one in alive))
            assert all(torch.equal(one, torch.full_like(one, len(one))) for one in alive)
        alive.clear()
    # Gaps between results may cost chunks of their own.
    assert sum(map(len, workspace._chunks)) <= 3 * most + 2 * CHUNK_BYTES


def test_memory_of_a_dead_result_is_given_out_again() -> None:
    workspace = Workspace()
    workspace.reset()
    for _ in range(100):
        workspace.take((CHUNK_BYTES // 8,), torch.float32)
    assert len(workspace._chunks) == 1
