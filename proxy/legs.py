"""One request on one node: deadlines, load, health and metrics of that leg. Knows no other leg."""

from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from engine.errors import RequestAbortedError, TandemError, UnavailableError
from engine.rpc.client import StreamDeadlines
from engine.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    KVTransferParams,
    SamplingParams,
)
from proxy.blame import outcome_of
from proxy.cluster.node import Node
from proxy.metrics import ProxyMetrics


def prefill_request(request: GenerateRequest) -> GenerateRequest:
    """What P is asked: the same sampling, one token, and to keep what it computed."""
    sampling = replace(
        request.sampling, max_tokens=1, min_tokens=min(request.sampling.min_tokens, 1)
    )
    params = KVTransferParams(do_remote_decode=True)
    return replace(request, sampling=sampling, kv_transfer_params=params)


def is_whole_answer(last: GenerateOutput, sampling: SamplingParams) -> bool:
    """True when what P generated is all that was asked for, so that D has nothing to do."""
    return last.finish_reason is FinishReason.STOP or sampling.max_tokens == 1


class Legs:
    """Runs legs under one policy's name and one set of deadlines."""

    def __init__(
        self, deadlines: StreamDeadlines, metrics: ProxyMetrics, *, policy_name: str
    ) -> None:
        self._deadlines = deadlines
        self._metrics = metrics
        self._policy_name = policy_name

    async def run(
        self, node: Node, request: GenerateRequest, *, total_s: float
    ) -> AsyncGenerator[GenerateOutput]:
        """The node's outputs. An unreachable node is out of use until it answers again."""
        outcome = "cancelled"
        try:
            async with aclosing(self._outputs(node, request, total_s)) as outputs:
                async for output in outputs:
                    outcome = outcome if output.finish_reason is None else "ok"
                    yield output
        except TandemError as error:
            outcome = outcome_of(error)
            if isinstance(error, UnavailableError):
                node.set_problem(str(error))
            raise
        finally:
            labels = (self._policy_name, node.kind, node.name, outcome)
            self._metrics.node_requests.labels(*labels).inc()

    async def _outputs(
        self, node: Node, request: GenerateRequest, total_s: float
    ) -> AsyncGenerator[GenerateOutput]:
        deadlines = replace_total(self._deadlines, total_s)
        with node.carrying():
            async with aclosing(node.client.generate(request, deadlines)) as outputs:
                async for output in outputs:
                    yield _refuse_failure(output, node)


def replace_total(deadlines: StreamDeadlines, total_s: float) -> StreamDeadlines:
    """The same waits within a shorter whole."""
    return StreamDeadlines(total_s, deadlines.first_output_s, deadlines.next_output_s)


def _refuse_failure(output: GenerateOutput, node: Node) -> GenerateOutput:
    if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise RequestAbortedError(f"node {node.name} ended the request: {output.finish_reason}")
    return output
