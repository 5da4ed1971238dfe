"""A worker of vLLM, `vllm serve` with NixlConnector, over its OpenAI-compatible HTTP API.

P answers one token and `kv_transfer_params`, which D gets unchanged, both under one X-Request-Id.
Prompts travel as token ids, and answers come back as token ids (`return_token_ids`): the proxy
alone makes text of them, so that an answer can go on on another D.

Facts of vLLM 0.32 that are not obvious: P gives parameters only where it does not stream. On a
hybrid model it leaves the last prompt token out, so its one token is no token of the answer. Only D
can tell P that a finished prefill is not wanted; else a lease of 30 s ends it. D does not notice
that P's blocks are another request's by then, so whoever is late must not be believed.
"""

import asyncio
import re
from collections.abc import AsyncGenerator, Mapping
from dataclasses import replace
from functools import partial
from typing import Final

import msgspec
import structlog

from engine.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    KVTransferParamsError,
    NodeLostError,
    RequestAbortedError,
    TandemError,
    UnavailableError,
)
from engine.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    SamplingParams,
    TokenId,
    TokenLogprob,
)
from proxy.backends.http_worker import HttpWorker, error_of
from proxy.backends.openai_completions import (
    Completion,
    body_for,
    completion_of,
    output_of,
    prompt_json,
)
from proxy.backends.worker import UNKNOWN, Backend, Call, HandOver, Prefill, prefill_sampling
from proxy.backends.worker_facts import (
    CounterRate,
    EventEndpoints,
    Metrics,
    model_cards,
    server_load,
    sources_of,
)
from serving.rpc.client import StreamDeadlines
from serving.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo
from serving.rpc.tokenizer_files import ModelFiles, read_model_files

log = structlog.get_logger()

PATH: Final = "/v1/completions"
LEASE_S: Final = 25.0
"""From P's answer to D's first token; vLLM's `kv_lease_duration` is 30 unless set otherwise."""
DONE: Final = b"[DONE]"
ASK_P: Final = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""As vLLM's own router writes it: P shall keep what it computes."""
STARTED: Final = "process_start_time_seconds"
RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"
USAGE: Final = "vllm:kv_cache_usage_perc"
BLOCK_SIZE: Final = re.compile("[1-9][0-9]{0,6}")
CACHE_CONFIG: Final = "vllm:cache_config_info"
PROMPT_TOKENS: Final = "vllm:prompt_tokens_by_source_total"
PREFILL_S: Final = "vllm:request_prefill_time_seconds_sum"
PULLED_LABEL: Final = 'source="external_kv_transfer"'
QUERIES, HITS = "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"
NAMES: Final = frozenset(
    {
        *(STARTED, RUNNING, WAITING, USAGE, CACHE_CONFIG, PROMPT_TOKENS, PREFILL_S),
        *(QUERIES, HITS),
    }
)


class VllmWorker:
    """A `Worker`, over `http`, which it closes.

    `tokenizer`: the folder or hub name of its model, None for the one that it names. `events`:
    where it publishes KV events, None to ask it.
    """

    backend = Backend.VLLM
    needs_prefill = False

    def __init__(
        self, http: HttpWorker, *, tokenizer: str | None, events: EventEndpoints | None
    ) -> None:
        self._http = http
        self._tokenizer = tokenizer
        self._given_events = events
        self._model = ""
        self._info: NodeInfo | None = None
        self._files: ModelFiles | None = None
        self._rate = CounterRate()

    def encode_prompt(self, request: GenerateRequest) -> bytes:
        return prompt_json(request)

    def can_continue(self, sampling: SamplingParams) -> bool:
        """Grammars and these penalties would count from the output that the next D makes."""
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        return not sampling.grammar and penalties == (0.0, 0.0)

    async def prefill(self, request: GenerateRequest, call: Call) -> Prefill:
        if request.sampling.prompt_logprobs is not None:
            # P may leave out the last prompt token, and with it a row.
            raise InvalidRequestError("a worker of vLLM gives no prompt_logprobs of a prefill")
        asked = msgspec.structs.replace(request, sampling=prefill_sampling(request))
        answer = await self._answer(asked, call, {"kv_transfer_params": ASK_P})
        output = output_of(answer.choice, asked.sampling, num_cached=answer.num_cached)
        params = answer.kv_transfer_params
        if isinstance(params, dict) and params:
            return Prefill(output, HandOver(self._engine_id, request.request_id, params))
        if output.finish_reason is not FinishReason.STOP:
            raise TandemError(
                f"worker {self._http.url.text} prefilled and handed nothing over: start it with "
                "--kv-transfer-config"
            )
        return Prefill(output, None)

    def generate(
        self, request: GenerateRequest, call: Call, hand_over: HandOver | None = None
    ) -> AsyncGenerator[GenerateOutput]:
        params = {} if hand_over is None else {"kv_transfer_params": hand_over.params}
        if request.sampling.prompt_logprobs is not None:
            return self._at_once(request, call, params)
        return self._streamed(request, call, params)

    async def _at_once(
        self, request: GenerateRequest, call: Call, params: Mapping[str, object]
    ) -> AsyncGenerator[GenerateOutput]:
        """One output: vLLM streams no answer with log-probabilities of its prompt."""
        answer = await self._answer(request, call, params)
        output = output_of(answer.choice, request.sampling, num_cached=answer.num_cached)
        rows = answer.prompt_logprobs(request)
        yield msgspec.structs.replace(output, prompt_logprobs=rows)

    async def _streamed(
        self, request: GenerateRequest, call: Call, params: Mapping[str, object]
    ) -> AsyncGenerator[GenerateOutput]:
        body = body_for(request, self._model, prompt=call.prompt, stream=True, **params)
        stream = _Stream(request.sampling, waits_for_pull=bool(params))
        deadlines = call.deadlines
        if params:
            # After that P may have given the blocks that D pulls to another request.
            deadlines = replace(deadlines, first_output_s=min(LEASE_S, deadlines.first_output_s))
        events = self._http.stream(PATH, body, request_id=request.request_id, deadlines=deadlines)
        try:
            async for data in events:
                if (output := stream.after(data)) is not None:
                    yield output
        except TandemError as error:
            raise stream.judged(error) from error
        finally:
            await events.aclose()
        if stream.last is None:
            raise NodeLostError(f"worker {self._http.url.text} broke its answer off")
        yield stream.last

    async def describe(self, timeout_s: float, *, is_lost: bool) -> NodeInfo:
        # Both at once: a poll has two seconds in all.
        ask = partial(self._http.get, timeout_s=timeout_s)
        (status, _), (_, page) = await asyncio.gather(ask("/health"), ask("/metrics"))
        metrics = Metrics(page, NAMES)
        engine_id = f"{self._http.url.text}#{metrics.total(STARTED):.2f}"
        if status != 200:
            return self._away(engine_id, f"/health answers {status}")
        if self._info is None or is_lost or engine_id != self._info.engine_id:
            self._info = await self._introduction(engine_id, metrics, timeout_s)
        computed = metrics.total(PROMPT_TOKENS, 'source="local_compute"')
        return msgspec.structs.replace(
            self._info,
            ready=True,
            num_requests_running=await self._num_running(metrics, timeout_s),
            num_requests_waiting=int(metrics.total(WAITING)),
            kv_cache_usage=min(1.0, max(0.0, metrics.largest(USAGE))),
            prefill_tokens_per_s=self._rate.after(computed, metrics.total(PREFILL_S)),
            prefix_query_tokens=int(metrics.total(QUERIES)),
            prefix_hit_tokens=int(metrics.total(HITS)),
        )

    async def num_pulled_tokens(self, timeout_s: float) -> int:
        """Tokens that it has pulled from others since its start."""
        _, page = await self._http.get("/metrics", timeout_s)
        metrics = Metrics(page, NAMES)
        if not metrics.has(RUNNING):
            raise UnavailableError(
                f"worker {self._http.url.text} counts no pulls: start it without "
                "--disable-log-stats"
            )
        return int(metrics.total(PROMPT_TOKENS, PULLED_LABEL))

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        if self._files is None:
            raise UnavailableError(f"worker {self._http.url.text} has not been reached yet")
        return self._files.files

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        deadlines = StreamDeadlines(timeout_s, timeout_s, timeout_s)
        await self._http.post("/reset_prefix_cache", b"", request_id="reset", deadlines=deadlines)

    async def release(self, engine_id: str, request_id: str, timeout_s: float) -> None:
        """Nothing to do: closing the connection aborts what is computed, a lease what is held."""

    def cut_off(self) -> None:
        self._http.cut_off()

    async def close(self) -> None:
        await self._http.close()

    @property
    def _engine_id(self) -> str:
        return "" if self._info is None else self._info.engine_id

    async def _answer(
        self, request: GenerateRequest, call: Call, params: Mapping[str, object]
    ) -> Completion:
        """The whole answer, where vLLM cannot stream it."""
        body = body_for(request, self._model, prompt=call.prompt, stream=False, **params)
        answer = await self._http.post(
            PATH, body, request_id=request.request_id, deadlines=call.deadlines
        )
        completion = completion_of(answer)
        if not completion.choices:
            raise RequestAbortedError(f"worker {self._http.url.text} answered without a choice")
        return completion

    async def _num_running(self, metrics: Metrics, timeout_s: float) -> int:
        if metrics.has(RUNNING):
            return int(metrics.total(RUNNING))
        _, body = await self._http.get("/load", timeout_s)
        return server_load(body)

    async def _introduction(self, engine_id: str, metrics: Metrics, timeout_s: float) -> NodeInfo:
        """A new life of the worker: its model and its geometry."""
        status, body = await self._http.get("/v1/models", timeout_s)
        if status != 200:
            raise UnavailableError(f"/v1/models answers {status}: is --backend-api-key right?")
        cards = model_cards(body)
        self._model, root = cards[0].id, cards[0].root or cards[0].id
        if self._files is None:
            name = self._tokenizer or root
            self._files = await asyncio.to_thread(read_model_files, name)
        return NodeInfo(
            engine_id=engine_id,
            kind="",
            model_names=tuple(card.id for card in cards),
            max_model_len=cards[0].max_model_len,
            vocab_size=self._files.vocab_size,
            root=root,
            kv_events=await self._kv_events(metrics.labels(CACHE_CONFIG), timeout_s),
            model_identity=f"vllm {self._model}"[:64],
        )

    async def _kv_events(self, cache: Mapping[str, str], timeout_s: float) -> KVEventsInfo | None:
        """Where and how it tells of its cache; None where it does not, or nothing can be said."""
        endpoints = self._given_events
        if endpoints is None:
            status, body = await self._http.get("/kv_event_sources", timeout_s)
            sources = sources_of(self._http.url, body) if status == 200 else []
            if len(sources) > 1:
                log.warning("events of data-parallel ranks are not read", node=self._http.url.text)
            endpoints = sources[0] if len(sources) == 1 else None
        block_size = cache.get("block_size", "")
        if endpoints is None or not BLOCK_SIZE.fullmatch(block_size):
            return None
        # A hybrid whose checkpoints nobody has heard of yet has nothing to resume from.
        has_states = cache.get("mamba_cache_mode", "none") != "none"
        kinds = ["full_attention", *(["mamba"] if has_states else [])]
        return KVEventsInfo(
            publisher="vllm",
            endpoint=endpoints.endpoint,
            replay_endpoint=endpoints.replay_endpoint,
            topic=endpoints.topic,
            hash_block_size=int(block_size),
            groups=tuple(map(KVGroupInfo, kinds)),
            model_identity=f"vllm {self._model}"[:64],
        )

    def _away(self, engine_id: str, reason: str) -> NodeInfo:
        known = UNKNOWN if self._info is None else self._info
        return msgspec.structs.replace(known, engine_id=engine_id, ready=False, reason=reason)


class _Stream:
    """A stream's events to outputs. `last` waits for the usage that follows it, and tells it."""

    def __init__(self, sampling: SamplingParams, *, waits_for_pull: bool) -> None:
        self.last: GenerateOutput | None = None
        self._sampling = sampling
        self._waits_for_pull = waits_for_pull

    def after(self, data: list[bytes]) -> GenerateOutput | None:
        """All tokens of the events that came together, unless they are the last ones."""
        tokens: list[TokenId] = []
        logprobs: list[TokenLogprob] = []
        for event in data:
            if event == DONE:
                continue
            chunk = completion_of(event)
            if chunk.error is not None:
                raise error_of(chunk.error_status, event)
            if self.last is not None:
                cached = chunk.num_cached or self.last.num_cached_tokens
                self.last = msgspec.structs.replace(self.last, num_cached_tokens=cached)
            elif chunk.choices:
                output = output_of(chunk.choice, self._sampling, num_cached=0)
                self._waits_for_pull = False
                tokens += output.token_ids
                logprobs += output.logprobs or ()
                self.last = output if output.finish_reason is not None else None
        found = tuple(logprobs) if self._sampling.logprobs is not None else None
        if self.last is None:
            return GenerateOutput(token_ids=tuple(tokens), logprobs=found) if tokens else None
        if tokens:
            self.last = msgspec.structs.replace(self.last, token_ids=tuple(tokens), logprobs=found)
        return None

    def judged(self, error: TandemError) -> TandemError:
        """Before the first token D's error, or its silence, is the hand-over's: D is well.

        Of a pull that failed D says no more than that something did; and after P's lease has ended
        nobody knows what a pull has read.
        """
        is_unclear = isinstance(error, RequestAbortedError | DeadlineExceededError)
        if not (is_unclear and self._waits_for_pull):
            return error
        return KVTransferParamsError(f"nothing came of the prefill: {error}")
