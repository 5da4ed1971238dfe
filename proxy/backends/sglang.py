"""A worker of SGLang, a prefill or a decode server, over its own HTTP API.

P and D get one request at once, and meet in a room of P's bootstrap server:

    proxy ──/generate, room──▶ P ──────── keys, first token ───────┐
      └─────/generate, room──▶ D   waits for the room, up to 1800 s ▼──▶ tokens

D does not hear of a P that has failed, so that the proxy watches P's answer until D's first token,
and ends D's request when P's fails (sglang #24159, #29017). A part that nobody wants any more is
aborted by its `rid`: of a closed connection the server hears seconds later.

A rid begins with its room, in 16 hex digits: SGLang aborts all whose rid begins with the given
text, and ids of clients may be prefixes of each other.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any, Final

import msgspec
import structlog

from engine.errors import (
    DeadlineExceededError,
    NodeLostError,
    TandemError,
    UnavailableError,
)
from engine.types import GenerateOutput, GenerateRequest, KVTransferStats, SamplingParams
from proxy.backends.http_worker import HttpWorker
from proxy.backends.sglang_facts import FAKE_TRANSFER, Loads, ModelInfo, ServerInfo, told
from proxy.backends.sglang_generate import Answer, body_for, chunk_of, prompt_json
from proxy.backends.worker import UNKNOWN, Backend, Call, HandOver, Prefill, PrefillFailedError
from proxy.backends.worker_facts import CounterRate, EventEndpoints, model_cards
from serving.rpc.client import StreamDeadlines
from serving.rpc.messages import NodeInfo
from serving.rpc.tokenizer_files import ModelFiles, read_model_files

log = structlog.get_logger()

PATH: Final = "/generate"
BOOTSTRAP_PORT: Final = 8998
"""SGLang's default."""
ROOM_BITS: Final = 63
DRAIN_S: Final = 5.0
"""P's answer comes a moment after D's first token, which needed all of P's work."""
P_ERROR_WAIT_S: Final = 0.5
"""D may hear of P's failure a moment before the proxy does."""
TRANSFER_ERRORS: Final = ("transfer failed", "handshake failed", "KVTransferError")
"""D's words where P may be the cause."""
ABORT_S: Final = 2.0
MAX_ABORTS: Final = 256


class SglangWorker:
    """A `Worker`, over `http`, which it closes.

    Owns the prefills that run on it as P, until `close`. `tokenizer`: the folder or hub name of its
    model, None for the one that it names. `events`: where it publishes KV events, None to ask it.
    """

    backend = Backend.SGLANG
    needs_prefill = True

    def __init__(
        self, http: HttpWorker, *, tokenizer: str | None, events: EventEndpoints | None
    ) -> None:
        self._http = http
        self._tokenizer = tokenizer
        self._given_events = events
        self._info: NodeInfo | None = None
        self._files: ModelFiles | None = None
        self._rate = CounterRate()
        self._bootstrap_port = BOOTSTRAP_PORT
        self._mode, self._num_switches = "", 0
        self._prefills: dict[str, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()

    def encode_prompt(self, request: GenerateRequest) -> bytes:
        return prompt_json(request)

    def can_continue(self, sampling: SamplingParams) -> bool:
        """Grammars and all penalties count from the output that the next D makes."""
        penalties = sampling.presence_penalty, sampling.frequency_penalty
        return (
            not sampling.grammar and penalties == (0.0, 0.0) and sampling.repetition_penalty == 1.0
        )

    async def prefill(self, request: GenerateRequest, call: Call) -> Prefill:
        """Returns at once: P's answer goes on beside D's, and comes when D has everything."""
        room = secrets.randbits(ROOM_BITS)
        rid = f"{room:016x}-{request.request_id}"
        params = {
            "bootstrap_host": self._http.url.host,
            "bootstrap_port": self._bootstrap_port,
            "bootstrap_room": room,
        }
        body = body_for(request, prompt=call.prompt, stream=False, rid=rid, **params)
        prefill = asyncio.create_task(
            self._run(rid, body, request_id=request.request_id, deadlines=call.deadlines)
        )
        # Owned here, since whoever waits for it may leave.
        self._prefills[rid] = prefill
        prefill.add_done_callback(partial(self._on_end, rid))
        return Prefill(GenerateOutput(), HandOver(self._engine_id, rid, params, prefill=prefill))

    async def generate(
        self, request: GenerateRequest, call: Call, hand_over: HandOver | None = None
    ) -> AsyncGenerator[GenerateOutput]:
        if hand_over is None or (prefill := hand_over.prefill) is None:
            raise UnavailableError(f"worker {self._http.url.text} computes no prompts itself")
        rid, was_met, is_whole = hand_over.request_id, False, False
        try:
            async with aclosing(self._outputs(request, call, hand_over)) as outputs:
                output = await self._first(outputs, call, prefill)
                was_met, is_whole = True, output.finish_reason is not None
                yield output
                async for output in outputs:
                    is_whole = output.finish_reason is not None
                    yield output
        except (GeneratorExit, asyncio.CancelledError, PrefillFailedError, DeadlineExceededError):
            if not is_whole:
                self._abort_soon(rid)
            raise
        finally:
            asyncio.get_running_loop().call_later(DRAIN_S if was_met else 0.0, prefill.cancel)

    async def describe(self, timeout_s: float, *, is_lost: bool) -> NodeInfo:
        ask = partial(self._http.get, timeout_s=timeout_s)
        (status, _), (info_status, body), (_, loads) = await asyncio.gather(
            ask("/ready"), ask("/server_info"), ask("/v1/loads?include=core")
        )
        if status == 404:
            # Of servers that have no /ready; where nothing runs, it generates a token.
            status, _ = await ask("/health")
        if info_status != 200:
            raise UnavailableError(
                f"/server_info answers {info_status}: is --backend-api-key right?"
            )
        server = told(body, ServerInfo, "/server_info")
        engine_id = f"{self._http.url.text}#{server.life}.{self._count_switches(server.mode)}"
        if status != 200:
            return self._away(engine_id, f"/ready answers {status}")
        if server.disaggregation_transfer_backend == FAKE_TRANSFER:
            return self._away(engine_id, "its --disaggregation-transfer-backend fake moves no keys")
        if self._info is None or is_lost or engine_id != self._info.engine_id:
            self._info = await self._introduction(engine_id, server, timeout_s)
        self._bootstrap_port = server.disaggregation_bootstrap_port or BOOTSTRAP_PORT
        return self._with_load(self._info, _loads_of(loads))

    async def num_pulled_tokens(self, timeout_s: float) -> int:
        """Not counted: D has no other way to an answer."""
        return 0

    async def get_tokenizer(self, timeout_s: float) -> Mapping[str, bytes]:
        if self._files is None:
            raise UnavailableError(f"worker {self._http.url.text} has not been reached yet")
        return self._files.files

    async def reset_prefix_cache(self, timeout_s: float) -> None:
        deadlines = StreamDeadlines(timeout_s, timeout_s, timeout_s)
        try:
            await self._http.post("/flush_cache", b"", request_id="reset", deadlines=deadlines)
        except TandemError as error:
            raise UnavailableError(f"/flush_cache: {error}") from error

    async def release(self, engine_id: str, request_id: str, timeout_s: float) -> None:
        """Ends P's part of a hand-over, which P hears of at once."""
        if (prefill := self._prefills.get(request_id)) is not None:
            prefill.cancel()

    def cut_off(self) -> None:
        self._http.cut_off()

    async def close(self) -> None:
        prefills = list(self._prefills.values())
        for prefill in prefills:
            prefill.cancel()
        await asyncio.gather(*prefills, return_exceptions=True)
        await asyncio.gather(*self._aborts)
        await self._http.close()

    @property
    def _engine_id(self) -> str:
        return "" if self._info is None else self._info.engine_id

    async def _run(
        self, rid: str, body: bytes, *, request_id: str, deadlines: StreamDeadlines
    ) -> None:
        """P's part of one request: its answer says only that it has done it."""
        try:
            answer = await self._http.post(PATH, body, request_id=request_id, deadlines=deadlines)
        except (asyncio.CancelledError, DeadlineExceededError):
            self._abort_soon(rid)
            raise
        if (failure := chunk_of(answer).failure) is not None:
            raise failure

    def _on_end(self, rid: str, prefill: asyncio.Task[None]) -> None:
        del self._prefills[rid]
        if not prefill.cancelled():
            prefill.exception()  # D's side tells it; nobody else has to.

    async def _outputs(
        self, request: GenerateRequest, call: Call, hand_over: HandOver
    ) -> AsyncGenerator[GenerateOutput]:
        """D's outputs, each with a token, or the last.

        That waits for the stream's end, so that the connection serves again.
        """
        params: Mapping[str, Any] = hand_over.params
        body = body_for(
            request, prompt=call.prompt, stream=True, rid=hand_over.request_id, **params
        )
        answer = Answer(request.sampling)
        events = self._http.stream(
            PATH, body, request_id=request.request_id, deadlines=call.deadlines
        )
        async with aclosing(events):
            async for data in events:
                for output in answer.outputs_of(data):
                    yield output
        if (last := answer.last) is None:
            raise NodeLostError(f"worker {self._http.url.text} broke its answer off")
        # D waits for P's keys, and cannot do without.
        pulled = KVTransferStats(prefill_cached_tokens=last.num_cached_tokens)
        yield msgspec.structs.replace(last, kv_transfer=pulled)

    async def _first(
        self,
        outputs: AsyncGenerator[GenerateOutput],
        call: Call,
        prefill: "asyncio.Future[None]",
    ) -> GenerateOutput:
        """D's first output. Raises PrefillFailedError where P's part fails first.

        A D that is late while P's part goes on is late because of it.
        """
        end = asyncio.get_running_loop().time() + call.deadlines.first_output_s
        asking = asyncio.create_task(_next(outputs))
        both: set[asyncio.Future[Any]] = {asking, prefill}
        try:
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # Where both have ended, D has its token, or an error of its own.
            if not asking.done():
                _raise_failure_of(prefill)
            return await asking
        except DeadlineExceededError as error:
            if not prefill.done() and asyncio.get_running_loop().time() >= end:
                raise PrefillFailedError(error) from error
            _raise_failure_of(prefill)
            raise
        except TandemError as error:
            if any(words in str(error) for words in TRANSFER_ERRORS):
                await asyncio.wait({prefill}, timeout=P_ERROR_WAIT_S)
                _raise_failure_of(prefill)
            raise
        finally:
            if not asking.done():
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)

    async def _introduction(self, engine_id: str, server: ServerInfo, timeout_s: float) -> NodeInfo:
        """A new life of the worker: its model and its geometry."""
        (_, about), (_, models) = await asyncio.gather(
            self._http.get("/model_info", timeout_s), self._http.get("/v1/models", timeout_s)
        )
        model = told(about, ModelInfo, "/model_info")
        cards = model_cards(models)
        if self._files is None:
            name = self._tokenizer or model.tokenizer_path or model.model_path
            self._files = await asyncio.to_thread(read_model_files, name)
        identity = f"sglang {cards[0].id}"[:64]
        return NodeInfo(
            engine_id=engine_id,
            kind=server.mode,
            model_names=tuple(card.id for card in cards),
            max_model_len=cards[0].max_model_len,
            vocab_size=self._files.vocab_size,
            root=model.model_path,
            kv_events=server.events_at(self._http.url, self._given_events, identity),
            model_identity=identity,
        )

    def _count_switches(self, mode: str) -> int:
        """How often it has changed its part, each time for another life."""
        self._num_switches += self._mode not in ("", mode)
        self._mode = mode
        return self._num_switches

    def _with_load(self, info: NodeInfo, loads: Loads) -> NodeInfo:
        computed = loads.total("total_prefill_uncached_tokens")
        busy_s = loads.total("total_prefill_busy_us") / 1e6
        return msgspec.structs.replace(
            info,
            ready=True,
            num_requests_running=loads.total("num_running_reqs"),
            num_requests_waiting=loads.total("num_waiting_reqs"),
            num_waiting_tokens=loads.total("num_waiting_uncached_tokens"),
            kv_cache_usage=loads.usage,
            prefill_tokens_per_s=self._rate.after(computed, busy_s),
        )

    def _away(self, engine_id: str, reason: str) -> NodeInfo:
        known = UNKNOWN if self._info is None else self._info
        return msgspec.structs.replace(known, engine_id=engine_id, ready=False, reason=reason)

    def _abort_soon(self, rid: str) -> None:
        """Tells the worker in the background; best effort, as its connection is closed too."""
        if len(self._aborts) < MAX_ABORTS:
            task = asyncio.create_task(self._abort(rid))
            self._aborts.add(task)
            task.add_done_callback(self._aborts.discard)

    async def _abort(self, rid: str) -> None:
        deadlines = StreamDeadlines(ABORT_S, ABORT_S, ABORT_S)
        body = msgspec.json.encode({"rid": rid})
        try:
            await self._http.post("/abort_request", body, request_id=rid, deadlines=deadlines)
        except TandemError as error:
            log.info("an abort was not heard", node=self._http.url.text, problem=str(error))


async def _next(outputs: AsyncGenerator[GenerateOutput]) -> GenerateOutput:
    return await anext(outputs)


def _raise_failure_of(prefill: "asyncio.Future[None]") -> None:
    """Raises PrefillFailedError for one that is over and has failed."""
    if not prefill.done():
        return
    if prefill.cancelled():
        raise PrefillFailedError(UnavailableError("it was given up"))
    error = prefill.exception()
    if isinstance(error, TandemError):
        raise PrefillFailedError(error) from error
    if error is not None:
        raise error


def _loads_of(body: bytes) -> Loads:
    """Of servers that do not tell their loads nothing is known."""
    try:
        return msgspec.json.decode(body, type=Loads)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return Loads()
