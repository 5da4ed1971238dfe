"""All that a server tells of its requests: metrics, the log, and traces where they are wanted.

The owner of the records that feed them; the same for a proxy and for a node.
"""

import asyncio
from collections.abc import Callable, Mapping

from engine.distribution import how_to_install
from engine.errors import ConfigError
from serving.config import ServerConfig
from serving.telemetry.request_log import RequestLog, log_throughput
from serving.telemetry.request_records import RecordReader, RequestRecords


class Telemetry:
    """`records` gets every request; `start` logs throughput from then on, `close` ends it all.

    `readers` hear of every request besides the log and the traces.
    """

    def __init__(
        self, config: ServerConfig, *readers: RecordReader, role: str, instance: str
    ) -> None:
        """Raises `ConfigError` where traces are wanted and cannot be had."""
        self._traces = None
        self.records = RequestRecords(RequestLog(), *readers)
        if (endpoint := config.otlp_traces_endpoint) is not None:
            try:
                from serving.telemetry.traces import Traces
            except ImportError as error:
                raise ConfigError(
                    "--otlp-traces-endpoint needs OpenTelemetry: "
                    f"{how_to_install('otel')} ({error})"
                ) from error
            self._traces = Traces(endpoint, service=f"tandem-{role}", instance=instance)
            self.records.readers.append(self._traces)
        self._task: asyncio.Task[None] | None = None

    def start(self, load: Callable[[], Mapping[str, object]]) -> None:
        """`load`: what else a line of throughput says."""
        self._task = asyncio.create_task(log_throughput(self.records, load))

    async def close(self) -> None:
        """Call it after the last request."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        if self._traces is not None:
            await self._traces.close()
