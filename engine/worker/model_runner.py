"""Runs the model over one step's batch on one device.

Owns the views of the arena and the weights; knows no queues, peers or text.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import structlog
import torch
from torch import Tensor

from engine.arena import ArenaMemory
from engine.errors import EngineGenerateError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.models.loader import CausalLM
from engine.step import ModelRunnerOutput, ScheduledRequest, SchedulerOutput
from engine.types import PromptLogprobs
from engine.worker import device_sampler
from engine.worker.decode_graphs import DecodeGraphs
from engine.worker.input_batch import InputBatcher
from engine.worker.kv_caches import layer_caches
from engine.worker.sampler import prompt_logprobs, sample

MAX_FAILED_PASSES = 8
"""After so many failed forward passes in a row the node is at fault, and its engine ends."""

log = structlog.get_logger()


@dataclass(slots=True, frozen=True)
class StepResults:
    """The results of a step that was launched: `read` waits for the device, and is called once.

    `lets_run_ahead`: the tokens that it chooses are kept where the next step's kernels find them,
    which may so be launched before they are read.
    """

    read: Callable[[], ModelRunnerOutput]
    lets_run_ahead: bool = False


class ModelRunner:
    """One rank: zero, copy, forward, keep states, sample."""

    def __init__(self, model: CausalLM, plan: ArenaPlan, arena: ArenaMemory) -> None:
        self.arena = arena
        self._model = model
        self._plan = plan
        self._caches = layer_caches(arena.tensor[: plan.arena_bytes], plan)
        self._batcher = InputBatcher(plan, arena.tensor.device)
        self._forward = partial(model.forward, caches=self._caches)
        recorder = model.recorder
        self._graphs = (
            None if recorder is None else DecodeGraphs(recorder, self._batcher, self._forward)
        )
        # A host that computes itself has its numbers at hand: it samples row by row, and at once.
        takes_padding = recorder is not None and recorder.takes_padding
        self._is_device = takes_padding or arena.tensor.device.type != "cpu"
        # Kernels and graphs go to the thread's current device, which is the first one until set.
        self._on_device: Callable[[], AbstractContextManager[object]] = nullcontext
        if arena.tensor.device.type == "cuda":
            self._on_device = partial(torch.cuda.device, arena.tensor.device)
        self._num_failed = 0

    @torch.inference_mode()
    def warm_up(self, max_num_seqs: int) -> None:
        """Records the steps of so many decodes, where they are recorded before they are needed."""
        if self._graphs is not None:
            with self._on_device():
                self._graphs.warm_up(max_num_seqs)

    def prepare(self, output: SchedulerOutput) -> None:
        """Zeroes new states, which may hold old bytes, and copies shared blocks before writes."""
        for group, state in output.new_states:
            self._bytes(group, state).zero_()
        for copy in output.copies:
            self._bytes(copy.group, copy.target).copy_(self._bytes(copy.group, copy.source))
        if output.new_states or output.copies:
            # Loads of this step fill the rest of such blocks, from another stream of a device.
            self.arena.mark_prepared()

    @torch.inference_mode()
    def launch(self, output: SchedulerOutput) -> StepResults:
        """Computes `output`, on a device later: one token, or an error, per request that samples.

        A forward pass that raises fails all of its requests: any of them may be the cause, and the
        states of all may be half written. Here or in `read`, MAX_FAILED_PASSES failures in a row
        raise.
        """
        if not output.scheduled:
            return StepResults(ModelRunnerOutput)
        ordered = self._batcher.order(output.scheduled)
        sampling = {item.request_id: item.sampling for item in ordered if item.sampling}
        try:
            with self._on_device():
                hidden, rows = self._run(ordered)
                self._keep_final_states(ordered)
                found = prompt_logprobs(hidden, ordered, self._model.logits)
                # Of those that sample, which are often all.
                logits = self._model.logits(hidden if len(rows) == len(hidden) else hidden[rows])
                chosen = device_sampler.launch(logits, sampling) if self._is_device else None
                is_kept = chosen is not None and self._keep(chosen.tokens, sampling)
        # Broad on purpose: torch raises many types, and none says which request was the cause.
        except Exception:
            failed = self._failed(ordered)
            return StepResults(lambda: failed)
        if chosen is None:
            self._num_failed = 0
            result = sample(logits, sampling) if sampling else ModelRunnerOutput()
            result.prompt_logprobs.update(found)
            return StepResults(lambda: result)
        return StepResults(partial(self._read, ordered, chosen, found), is_kept)

    def _keep(self, tokens: Tensor, sampling: Iterable[str]) -> bool:
        """True if the next step may be launched before the host has seen `tokens`."""
        return self._graphs is not None and self._graphs.keep(tokens, sampling)

    def _read(
        self,
        ordered: Sequence[ScheduledRequest],
        chosen: device_sampler.Sampling,
        found: dict[str, PromptLogprobs],
    ) -> ModelRunnerOutput:
        try:
            result = chosen.result()
        # Broad on purpose, as above: what a kernel did wrong is told here.
        except Exception:
            return self._failed(ordered)
        self._num_failed = 0
        result.prompt_logprobs.update(found)
        return result

    def _failed(self, ordered: Sequence[ScheduledRequest]) -> ModelRunnerOutput:
        """In an `except`: an error for each request, or the exception when it is one too many."""
        self._num_failed += 1
        if self._num_failed == MAX_FAILED_PASSES:
            raise
        log.exception("a forward pass failed", num_requests=len(ordered))
        error = EngineGenerateError("the forward pass failed; the node's log says why")
        return ModelRunnerOutput(failed={item.request_id: error for item in ordered})

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
