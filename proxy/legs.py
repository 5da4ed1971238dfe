"""One request on one node: deadlines, load, health and metrics of that leg. Knows no other leg."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager

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


class Leg:
    """A request under way on `node`, read output by output until one has a finish reason."""

    def __init__(self, node: Node, outputs: AsyncGenerator[GenerateOutput]) -> None:
        self.node = node
        self.outcome = "cancelled"
        self._outputs = outputs

    async def read(self) -> GenerateOutput:
        """Raises what ended the request; an unreachable node is out of use until it answers."""
        try:
            output = await anext(self._outputs)
            self._check(output)
        except TandemError as error:
            self.outcome = outcome_of(error)
            if isinstance(error, UnavailableError):
                self.node.set_problem(str(error))
            raise
        self.node.on_sign_of_life()
        if output.finish_reason is not None:
            self.outcome = "ok"
        return output

    def _check(self, output: GenerateOutput) -> None:
        if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            reason = output.finish_reason
            raise RequestAbortedError(f"node {self.node.name} ended the request: {reason}")


class Legs:
    """Runs legs under one policy's name and one set of deadlines."""

    def __init__(
        self, deadlines: StreamDeadlines, metrics: ProxyMetrics, *, policy_name: str
    ) -> None:
        self._deadlines = deadlines
        self._metrics = metrics
        self._policy_name = policy_name

    @asynccontextmanager
    async def run(
        self, node: Node, request: GenerateRequest, *, total_s: float
    ) -> AsyncIterator[Leg]:
        """A leg that ends with the block, on the node too."""
        deadlines = StreamDeadlines(
            total_s, self._deadlines.first_output_s, self._deadlines.next_output_s
        )
        with node.carrying():
            async with aclosing(node.client.generate(request, deadlines)) as outputs:
                leg = Leg(node, outputs)
                try:
                    yield leg
                finally:
                    labels = (self._policy_name, node.kind, node.name, leg.outcome)
                    self._metrics.node_requests.labels(*labels).inc()
