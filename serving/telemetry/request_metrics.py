"""Latencies and sizes of requests, under vLLM's names, from the record of each."""

from typing import Final

from engine.errors import EngineGenerateError, KVLoadError
from engine.types import FinishReason, GenerateOutput
from serving.metrics import ServerMetrics
from serving.telemetry.request_records import RecordReader, RequestRecord

# vLLM's buckets for vLLM's names (vllm/v1/metrics/loggers.py), in seconds. Histograms of nodes, of
# the proxy and of vLLM can be added up only if all of them have the same buckets.
TTFT_BUCKETS: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
ITL_BUCKETS: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
E2E_BUCKETS: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0),
    *(40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
LENGTH_BUCKETS: Final = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
CHOICE_BUCKETS: Final = (1.0, 2.0, 5.0, 10.0, 20.0)
SHARE_BUCKETS: Final = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0)

ENGINE_FAILURES: Final = (EngineGenerateError.__name__, KVLoadError.__name__)


class RequestMetrics(RecordReader):
    """Latencies and token counts of requests as their outputs leave, in nodes and in the proxy."""

    def __init__(self, metrics: ServerMetrics) -> None:
        self.ttft = metrics.histogram(
            "vllm:time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS
        )
        self.itl = metrics.histogram(
            "vllm:inter_token_latency_seconds", "Time between tokens.", ITL_BUCKETS
        )
        self.e2e = metrics.histogram(
            "vllm:e2e_request_latency_seconds", "Arrival to last token.", E2E_BUCKETS
        )
        self.prompt_tokens = metrics.counter("vllm:prompt_tokens", "Prompt tokens of requests.")
        self.generation_tokens = metrics.counter("vllm:generation_tokens", "Tokens generated.")
        self.finished = metrics.counter_by(
            "finished_reason", "vllm:request_success", "Requests that ended, by reason."
        )

    def began(self, record: RequestRecord) -> None:
        self.prompt_tokens.inc(record.num_prompt_tokens)

    def output(self, record: RequestRecord, output: GenerateOutput, gap_s: float | None) -> None:
        if output.token_ids:
            self.generation_tokens.inc(len(output.token_ids))
            if gap_s is not None:
                self.itl.observe(gap_s)
            elif record.first_output is not None:
                self.ttft.observe(record.first_output)
        if output.finish_reason is not None:
            self.e2e.observe(record.age)
            self.finished(output.finish_reason).inc()


class EngineRequestMetrics(RequestMetrics):
    """All that a node tells of its requests: their parts in the engine, and their sizes."""

    def __init__(self, metrics: ServerMetrics) -> None:
        super().__init__(metrics)
        self.transfer_share = metrics.histogram(
            "tandem:kv_transfer_ttft_share",
            "Part of the time from arrival to the first token computed here that the pull took.",
            SHARE_BUCKETS,
        )
        self.prompt_lengths = metrics.histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", LENGTH_BUCKETS
        )
        self.generation_lengths = metrics.histogram(
            "vllm:request_generation_tokens", "Tokens generated for a request.", LENGTH_BUCKETS
        )
        self.queue_seconds = metrics.histogram(
            "vllm:request_queue_time_seconds", "Arrival to first blocks.", E2E_BUCKETS
        )
        self.prefill_seconds = metrics.histogram(
            "vllm:request_prefill_time_seconds", "First blocks to first token.", E2E_BUCKETS
        )
        self.decode_seconds = metrics.histogram(
            "vllm:request_decode_time_seconds", "First token to last token.", E2E_BUCKETS
        )
        self.inference_seconds = metrics.histogram(
            "vllm:request_inference_time_seconds", "First blocks to last token.", E2E_BUCKETS
        )
        self.seconds_per_token = metrics.histogram(
            "vllm:request_time_per_output_token_seconds",
            "First token to last token, for each token after the first.",
            ITL_BUCKETS,
        )
        self.longest_choices = metrics.histogram(
            "vllm:request_max_num_generation_tokens",
            "Tokens generated for a request, each choice for itself.",
            LENGTH_BUCKETS,
        )
        self.max_tokens = metrics.histogram(
            "vllm:request_params_max_tokens", "Most tokens that a request asks for.", LENGTH_BUCKETS
        )
        self.choices = metrics.histogram(
            "vllm:request_params_n", "Choices that a request asks for.", CHOICE_BUCKETS
        )

    def began(self, record: RequestRecord) -> None:
        super().began(record)
        self.max_tokens.observe(record.request.sampling.max_tokens)
        if record.request.origin.num_choices:
            self.choices.observe(record.request.origin.num_choices)

    def ended(self, record: RequestRecord) -> None:
        self.prompt_lengths.observe(record.num_prompt_tokens)
        self.generation_lengths.observe(record.num_tokens)
        self.longest_choices.observe(record.num_tokens)
        if record.outcome in ENGINE_FAILURES:
            self.finished(FinishReason.ERROR).inc()
        moved = record.kv_transfer
        if moved is not None and not moved.cause and record.second_output is not None:
            self.transfer_share.observe(moved.transfer_ms / 1e3 / record.second_output)
        first, last = record.first_output, record.last_output
        if first is None or last is None:
            return
        self.decode_seconds.observe(last - first)
        if record.num_tokens > 1:
            self.seconds_per_token.observe((last - first) / (record.num_tokens - 1))
        if record.queue_s is not None:
            self.queue_seconds.observe(record.queue_s)
            self.inference_seconds.observe(last - record.queue_s)
            # D sends P's token before it has blocks: there is no prefill to time.
            if first > record.queue_s:
                self.prefill_seconds.observe(first - record.queue_s)
