"""asyncio in front of the engine thread: generate, health, close.

    event loop       generate --admit--> _inbox ------------------> engine thread: core.step()
                     _streams <--call_soon_threadsafe(_deliver)---- news, once per step

Knows nothing of HTTP or gRPC.
"""

import asyncio
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import structlog
from msgspec import structs

from engine.core import EngineCore
from engine.errors import (
    EngineDeadError,
    KVTransferParamsError,
    TandemError,
    UnavailableError,
)
from engine.grammars.compiler import GrammarCompiler
from engine.grammars.matcher import Matcher
from engine.kv_connector import AdmissionConnector, Admitted, FirstToken
from engine.prompt_checks import (
    check_bad_words,
    check_output,
    check_priority,
    check_prompt,
    check_prompt_logprobs,
    check_token_ids,
)
from engine.request import Request, unique_id
from engine.step import StepNews
from engine.types import GenerateOutput, GenerateRequest, HandOverProblem

IDLE_POLL_S = 0.02
JOIN_TIMEOUT_S = 30.0
BETWEEN_STEPS_S = 30.0
SHUTTING_DOWN = "the node is shutting down"

log = structlog.get_logger()

Stream = asyncio.Queue[GenerateOutput | TandemError]
"""One caller's mailbox; the tokens of the request bound its length."""


@dataclass(slots=True, frozen=True)
class EngineLimits:
    """The bounds of a request, the tokens that end one, and the compiler of grammars."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    grammars: GrammarCompiler


class OutputObserver(Protocol):
    """Sees the outputs of one request as its caller takes them."""

    def observe(self, output: GenerateOutput) -> None: ...


Recording = Callable[[GenerateRequest], AbstractContextManager[OutputObserver]]
"""Entered when a request is admitted, left when it is over, with the error that ended it."""


class _Unobserved:
    def observe(self, output: GenerateOutput) -> None:
        pass


class AsyncEngine:
    """Owner of the engine thread; start and close it on the event loop that calls `generate`."""

    def __init__(
        self,
        core: EngineCore,
        admission: AdmissionConnector,
        limits: EngineLimits,
        *,
        recording: Recording = lambda _: nullcontext(_Unobserved()),
    ) -> None:
        self.core = core
        self.limits = limits
        self._admission = admission
        self._recording = recording
        # Calls for the engine thread, at most two per request (add, abort).
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        # Only the event loop reads and writes the streams, so they need no lock.
        self._streams: dict[str, Stream] = {}
        self._counter = 0
        self._num_admitting = 0
        self._refuses_new = False
        self._is_over = False
        self._stopping = False
        self._dead: BaseException | None = None
        self._ended = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the engine thread; call once, on the event loop."""
        self._loop = asyncio.get_running_loop()
        self.limits.grammars.news.tell(self.wake)
        self._thread.start()

    def wake(self) -> None:
        """Makes an idle engine step; from any thread (a transfer ended, a mask has arrived)."""
        self._inbox.put(lambda: None)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """The outputs of one request, the last with a finish reason; `aclose` aborts it.

        Raises InvalidRequestError (also for kv_transfer_params and grammars), OverloadedError,
        KVLoadError, EngineGenerateError, EngineDeadError, and UnavailableError when the node is
        about to end.
        """
        if self._refuses_new:
            raise UnavailableError(SHUTTING_DOWN)
        self._validate(request)
        admitted, matcher = await self._admitted(request)
        request_id = admitted.request.request_id
        stream = self._streams[request_id] = Stream()
        all_taken = False
        try:
            with self._recording(admitted.request) as record:
                self._submit(admitted, matcher)
                while not all_taken:
                    output = await _next_output(stream)
                    record.observe(output)
                    yield output
                    all_taken = output.finish_reason is not None
        finally:
            del self._streams[request_id]
            if matcher is not None:
                matcher.close()
            if not all_taken:
                # The caller left or failed. The scheduler ignores ids that it does not know.
                self._inbox.put(lambda: self._abort(request_id))

    async def between_steps(self, call: Callable[[], None]) -> None:
        """Runs `call` in the engine thread, and raises the TandemError that it raises.

        Raises EngineDeadError where the thread has ended or does not come to it in time.
        """
        done: asyncio.Future[TandemError | None] = asyncio.get_running_loop().create_future()

        def guarded() -> None:
            error = None
            try:
                self._emit(self.core.settle())
                call()
            except TandemError as raised:
                error = raised
            self._on_loop(lambda: None if done.done() else done.set_result(error))

        await self.check_health()
        self._inbox.put(guarded)
        try:
            error = await asyncio.wait_for(done, BETWEEN_STEPS_S)
        except TimeoutError:
            raise _dead_engine() from None
        if error is not None:
            raise error

    @property
    def is_alive(self) -> bool:
        return self._dead is None and not self._stopping

    async def check_health(self) -> None:
        """Raises EngineDeadError when the engine thread has stopped."""
        if not self.is_alive:
            raise _dead_engine()

    async def check_ready(self) -> tuple[str, ...]:
        """One line for each peer whose hand-overs fail and whose prompts this node computes itself.

        Raises UnavailableError when this node must not get traffic.
        """
        if self.problem:
            raise UnavailableError(self.problem)
        return tuple(problem.reason("this node") for problem in self.hand_over_problems)

    @property
    def hand_over_problems(self) -> tuple[HandOverProblem, ...]:
        return self._admission.problems()

    @property
    def problem(self) -> str:
        """The reason why this node must get no traffic; empty if it may."""
        if not self.is_alive:
            return "the engine is not running"
        return SHUTTING_DOWN if self._refuses_new else ""

    @property
    def num_open(self) -> int:
        """Requests under way, from admission until the caller has taken the last output."""
        return self._num_admitting + len(self._streams)

    def refuse_new(self) -> None:
        """Refuses new requests and fails /ready from now on; requests under way continue."""
        self._refuses_new = True

    def end_open(self) -> None:
        """Ends the requests under way with an error that their callers see."""
        self._refuses_new = self._is_over = True
        self._fail_all(UnavailableError(SHUTTING_DOWN))

    async def wait(self) -> None:
        """Returns when the engine is closed. Raises EngineDeadError when its thread died."""
        await self._ended.wait()
        if self._dead is not None:
            raise EngineDeadError(f"the engine died: {self._dead!r}")

    async def close(self) -> None:
        """Stops the engine thread after its current step and frees its memory."""
        if self._stopping:
            return
        self._stopping = True
        self.wake()  # an idle thread sleeps on the inbox
        await asyncio.to_thread(self._thread.join, JOIN_TIMEOUT_S)
        # Its connector may wait for threads that wait for this event loop.
        await asyncio.to_thread(self.core.close)
        self._fail_all(EngineDeadError("the node is shutting down"))
        self._ended.set()

    def _validate(self, request: GenerateRequest) -> None:
        vocab_size, max_model_len = self.limits.vocab_size, self.limits.max_model_len
        check_prompt(request.prompt_token_ids, vocab_size=vocab_size, max_model_len=max_model_len)
        sampling = request.sampling
        room = min(sampling.max_tokens, max_model_len - len(request.prompt_token_ids))
        check_output(request.output_token_ids, room=room, vocab_size=vocab_size)
        check_token_ids(sampling.stop_token_ids, vocab_size, "stop_token_ids")
        check_token_ids(tuple(sampling.logit_bias), vocab_size, "logit_bias")
        check_token_ids(sampling.allowed_token_ids, vocab_size, "allowed_token_ids")
        check_bad_words(sampling.bad_words, vocab_size)
        check_prompt_logprobs(len(request.prompt_token_ids), sampling.prompt_logprobs)
        check_priority(request.priority, self.core.scheduler.config.scheduling_policy)

    async def _admitted(self, request: GenerateRequest) -> tuple[Admitted, Matcher | None]:
        """The request with its id here, and what follows its grammar, which the caller closes."""
        matcher, sampling = None, request.sampling
        self._num_admitting += 1
        try:
            if sampling.grammar:
                matcher = await self.limits.grammars.compile(
                    sampling.grammar, request.output_token_ids, tenant=request.tenant
                )
            # Callers' ids are labels: two callers may use the same one at the same time.
            self._counter += 1
            unique = unique_id(request.request_id, self._counter)
            own = structs.replace(request, request_id=unique)
            return await self._admission.admit(own), matcher
        except BaseException:
            if matcher is not None:
                matcher.close()
            raise
        finally:
            self._num_admitting -= 1

    def _submit(self, admitted: Admitted, matcher: Matcher | None) -> None:
        origin, first = admitted.request, admitted.first_token
        # Admission awaits: the engine may have died or closed since `generate` looked.
        if self._is_over or not self.is_alive:
            self._admission.withdraw(origin.request_id)
            raise UnavailableError(SHUTTING_DOWN) if self.is_alive else _dead_engine()
        if matcher and first and not matcher.allows(first.token_id):
            self._admission.withdraw(origin.request_id)
            raise KVTransferParamsError(
                f"first_token_ids {first.token_id}: the request's grammar does not allow it"
            )
        request = Request.from_generate(
            origin,
            self.core.scheduler.cache.hasher,
            max_model_len=self.limits.max_model_len,
            eos_token_ids=self.limits.eos_token_ids,
            matcher=matcher,
        )
        self._inbox.put(lambda: self._add(request, first))

    def _add(self, request: Request, first_token: FirstToken | None) -> None:
        """Runs in the engine thread."""
        try:
            self.core.scheduler.add(request, first_token)
        except TandemError as error:
            self._admission.withdraw(request.request_id)
            self._emit(StepNews(errors=[(request.request_id, error)]))

    def _abort(self, request_id: str) -> None:
        """Runs in the engine thread."""
        # A step that runs ahead may be writing to the request's blocks.
        self._emit(self.core.settle())
        self.core.scheduler.abort(request_id)

    def _run(self) -> None:
        """The engine thread."""
        # Broad on purpose: whatever ends this thread must reach the callers and `wait`.
        try:
            while not self._stopping:
                while not self._inbox.empty():
                    self._inbox.get_nowait()()
                news, may_go_on = self.core.step()
                self._emit(news)
                if not may_go_on:
                    self._wait_for_inbox()
        except Exception as error:
            log.exception("the engine thread died")
            self._dead = error
            # Callers get their error before `wait` returns and the process ends.
            self._on_loop(lambda: self._fail_all(_dead_engine()))
            self._on_loop(self._ended.set)

    def _wait_for_inbox(self) -> None:
        """Until a call comes or the next lease ends, and not for long while requests wait."""
        deadline = self.core.next_deadline()
        seconds = None if deadline is None else max(0.0, deadline - time.monotonic())
        try:
            call = self._inbox.get(timeout=IDLE_POLL_S if self.core.scheduler.has_work else seconds)
        except queue.Empty:
            return
        call()

    def _emit(self, news: StepNews) -> None:
        if news.outputs or news.errors:
            self._on_loop(lambda: self._deliver(news))

    def _on_loop(self, call: Callable[[], None]) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    def _deliver(self, news: StepNews) -> None:
        items: list[tuple[str, GenerateOutput | TandemError]] = [*news.outputs, *news.errors]
        for request_id, item in items:
            stream = self._streams.get(request_id)
            if stream is not None:  # None: the caller left while this step ran
                stream.put_nowait(item)

    def _fail_all(self, error: TandemError) -> None:
        for stream in self._streams.values():
            stream.put_nowait(error)


async def _next_output(stream: Stream) -> GenerateOutput:
    """Raises the error that came in its place."""
    output = await stream.get()
    if isinstance(output, TandemError):
        raise output
    return output


def _dead_engine() -> EngineDeadError:
    """The error for clients; the cause stands in the log only."""
    return EngineDeadError("the engine of this node has stopped; its log says why")
