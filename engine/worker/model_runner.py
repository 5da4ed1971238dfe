"""Runs the model over one step's batch on one device.

Owns the views of the arena and the weights; knows no queues, peers or text.
"""

from functools import partial

import structlog
import torch
from torch import Tensor

from engine.arena import ArenaMemory
from engine.errors import EngineGenerateError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.models.loader import CausalLM
from engine.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from engine.worker.decode_graphs import DecodeGraphs
from engine.worker.input_batch import InputBatcher
from engine.worker.kv_caches import layer_caches
from engine.worker.sampler import prompt_logprobs, sample

MAX_FAILED_PASSES = 8
"""After so many failed forward passes in a row the node is at fault, and its engine ends."""

log = structlog.get_logger()


class ModelRunner:
    """One rank: zero, copy, forward, keep states, sample."""

    def __init__(self, model: CausalLM, plan: ArenaPlan, arena: ArenaMemory) -> None:
        self.arena = arena
        self._model = model
        self._plan = plan
        self._caches = layer_caches(arena.tensor[: plan.arena_bytes], plan)
        self._batcher = InputBatcher(plan, arena.tensor.device)
        self._forward = partial(model.forward, caches=self._caches)
        self._graphs = (
            None
            if model.kernels is None
            else DecodeGraphs(model.kernels, self._batcher, self._forward)
        )
        self._num_failed = 0

    def prepare(self, output: SchedulerOutput) -> None:
        """Zeroes new states, which may hold old bytes, and copies shared blocks before writes."""
        for group, state in output.new_states:
            self._bytes(group, state).zero_()
        for copy in output.copies:
            self._bytes(copy.group, copy.target).copy_(self._bytes(copy.group, copy.source))

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Computes `output`; one token, or an error, per request whose tokens are all computed.

        A forward pass that raises fails all of its requests: any of them may be the cause, and the
        states of all may be half written. Raises after MAX_FAILED_PASSES failures in a row.
        """
        if not output.scheduled:
            return ModelRunnerOutput()
        ordered = self._batcher.order(output.scheduled)
        sampling = {item.request_id: item.sampling for item in ordered if item.sampling}
        try:
            hidden, rows = self._run(ordered)
            self._keep_final_states(ordered)
            found = prompt_logprobs(hidden, ordered, self._model.logits)
            # Of those that sample, which are often all.
            logits = self._model.logits(hidden if len(rows) == len(hidden) else hidden[rows])
            self._num_failed = 0
        except Exception:
            # Broad on purpose: torch raises many types, and none says which request was the cause.
            self._num_failed += 1
            if self._num_failed == MAX_FAILED_PASSES:
                raise
            log.exception("a forward pass failed", num_requests=len(ordered))
            error = EngineGenerateError("the forward pass failed; the node's log says why")
            return ModelRunnerOutput(failed={item.request_id: error for item in ordered})
        result = sample(logits, sampling) if sampling else ModelRunnerOutput()
        result.prompt_logprobs.update(found)
        return result

    def _run(self, ordered: list[ScheduledRequest]) -> tuple[Tensor, Tensor]:
        """Hidden states [tokens, hidden] and the rows, ascending, whose logits are wanted."""
        if self._graphs is not None and (found := self._graphs.run(ordered)) is not None:
            return found
        batch = self._batcher.build(ordered)
        return self._forward(batch), batch.logits_rows

    def _keep_final_states(self, ordered: list[ScheduledRequest]) -> None:
        """Copies checkpoints at a chunk's end; the layers have written those inside the chunk."""
        final = ((i.tables, save) for i in ordered for save in i.saves if save.num_tokens == i.end)
        for tables, save in final:
            for group, target in save.states.items():
                self._bytes(group, target).copy_(self._bytes(group, tables[group][0]))

    def _bytes(self, group: int, block: int) -> Tensor:
        start = self._plan.block_offset(group, block)
        return self.arena.tensor[start : start + self._plan.block_bytes(group)]
