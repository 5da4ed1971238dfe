"""Latency of token streams, seen from the proxy. Wraps any generator; knows nothing of nodes."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from engine.api.generator import Generator
from engine.types import GenerateOutput, GenerateRequest
from proxy.metrics import ProxyMetrics


class MeasuredGenerator:
    """The wrapped generator, with TTFT, ITL, end-to-end time and finish reasons recorded."""

    def __init__(self, inner: Generator, metrics: ProxyMetrics, model_name: str) -> None:
        self._inner = inner
        self._metrics = metrics
        self._model_name = model_name

    async def check_health(self) -> None:
        await self._inner.check_health()

    async def check_ready(self) -> tuple[str, ...]:
        return await self._inner.check_ready()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput]:
        started = time.monotonic()
        previous: float | None = None
        async with aclosing(self._inner.generate(request)) as outputs:
            async for output in outputs:
                if output.token_ids:
                    previous = self._observe_tokens(started, previous)
                if output.finish_reason is not None:
                    self._observe_end(started, output)
                yield output

    def _observe_tokens(self, started: float, previous: float | None) -> float:
        now = time.monotonic()
        if previous is None:
            self._metrics.time_to_first_token.labels(self._model_name).observe(now - started)
        else:
            self._metrics.inter_token_latency.labels(self._model_name).observe(now - previous)
        return now

    def _observe_end(self, started: float, output: GenerateOutput) -> None:
        elapsed = time.monotonic() - started
        self._metrics.e2e_request_latency.labels(self._model_name).observe(elapsed)
        self._metrics.request_success.labels(self._model_name, output.finish_reason).inc()
