"""Runs the model over one step's batch on one device.

Owns the arena, its views and the weights; knows nothing of queues, peers or text.
"""

import torch

from engine.arena import ArenaMemory
from engine.kv_cache.plan import ArenaPlan
from engine.models.registry import CausalLM
from engine.step import SampledToken, SchedulerOutput
from engine.worker.input_batch import InputBatcher
from engine.worker.kv_caches import layer_caches
from engine.worker.sampler import sample


class ModelRunner:
    """One rank: zero new states, forward, sample."""

    def __init__(self, model: CausalLM, plan: ArenaPlan, arena: ArenaMemory) -> None:
        self.arena = arena
        self._model = model
        self._plan = plan
        self._caches = layer_caches(arena.tensor, plan)
        self._batcher = InputBatcher(plan, arena.tensor.device)

    def zero_states(self, states: tuple[tuple[int, int], ...]) -> None:
        """Zeroes freshly allocated states, which may have held anything; [(group, state), ...]."""
        for group, state in states:
            start = self._plan.block_offset(group, state)
            self.arena.tensor[start : start + self._plan.block_bytes(group)].zero_()

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> dict[str, SampledToken]:
        """Computes `output`; one token per request that reached its end, by request id."""
        if not output.scheduled:
            return {}
        ordered = self._batcher.order(output.scheduled)
        batch = self._batcher.build(ordered)
        hidden = self._model.forward(batch, self._caches)
        sampling = [item.request for item in ordered if item.samples]
        if not sampling:
            return {}
        return sample(self._model.logits(hidden[batch.logits_rows]), sampling)
