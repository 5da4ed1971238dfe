"""One request's part of the current step, and its form for the worker: ids and numbers."""

from dataclasses import dataclass

from engine.kv_cache.mamba_states import Checkpoint
from engine.request import Request
from engine.step import SamplingInput, ScheduledRequest, StateSave


@dataclass(slots=True)
class Planned:
    """The next `num_tokens` of `request`; they count as computed once the worker returns."""

    request: Request
    num_tokens: int
    checkpoints: tuple[Checkpoint, ...]

    def worker_input(self) -> ScheduledRequest:
        """The worker's view; it samples only if the step computes the last known token."""
        request = self.request
        assert request.blocks is not None
        start, end = request.num_computed_tokens, request.num_computed_tokens + self.num_tokens
        return ScheduledRequest(
            request.request_id,
            request.token_ids[start:end],
            start,
            request.blocks.groups,
            _sampling_input(request) if end == request.num_tokens else None,
            tuple(StateSave(kept.num_tokens, kept.states) for kept in self.checkpoints),
        )


def _sampling_input(request: Request) -> SamplingInput:
    params = request.sampling
    return SamplingInput(
        params,
        request.num_tokens,
        request.forbidden_tokens(),
        frozenset(request.token_ids) if params.repetition_penalty != 1.0 else frozenset(),
        request.token_counts,
    )
