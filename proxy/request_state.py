"""The attempts of one request, and what may be tried next. Pure but for the clock."""

import asyncio
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Final

from msgspec import structs

from engine.errors import DeadlineExceededError, NodeLostError, TandemError, is_client_fault
from engine.types import GenerateOutput, GenerateRequest, TokenId
from proxy.backends.worker import Backend, HandOver, Worker
from proxy.cluster.node import Node
from proxy.errors import is_engine_failure
from proxy.routing.policies import Route
from proxy.routing.prompt import RoutedPrompt
from serving.telemetry.request_records import RequestRecord

MAX_ATTEMPTS: Final = 2
MAX_LOST: Final = 1
"""Nodes that may go away with a request before the proxy takes the request for the cause."""
MAX_CONTINUATIONS: Final = 4
INNOCENT_TOKENS: Final = 16
"""A node that sent so many tokens was not lost because of them: what failed before is forgiven."""


@dataclass(slots=True, frozen=True)
class Prefilled:
    """P's one output, and what D takes over; without that the output is the whole answer.

    `part`: P's share of the request, open where it goes on beside D's; then D brings the output.
    """

    node: Node
    output: GenerateOutput
    hand_over: HandOver | None
    part: ExitStack | None = None

    def end_part(self, error: BaseException | None) -> None:
        """P's share is over, by `error` or well; only the first end counts."""
        if self.part is not None:
            kind = None if error is None else type(error)
            self.part.pop_all().__exit__(kind, error, None)


@dataclass(slots=True)
class RequestState:
    """The state that the attempts at one request share.

    `request` is what nodes are asked for: once a decode node has failed with it, with the output
    that the client has. `sent` is all of that output, and `num_before` is how much of it came
    before the current attempt, whose are `route` and `prefilled`.

        sent   [ num_before ........ | num_new ...... ]
                 request.output_token_ids

    `deadline` is in event-loop time. `failed` has the engine ids of nodes that must not get the
    request again, unless they restart; `num_lost` of them went away while they had it.
    `model_identity`: that of the decode node of the last attempt. `num_prefills_lost`: those
    that failed while D waited for them; the first one costs no attempt.
    """

    request: GenerateRequest
    deadline: float
    record: RequestRecord
    failed: set[str] = field(default_factory=set)
    sent: list[TokenId] = field(default_factory=list)
    num_before: int = 0
    num_attempts: int = 0
    num_continuations: int = 0
    num_lost: int = 0
    num_prefills_lost: int = 0
    num_cached_tokens: int | None = None
    num_lost_to_state: int = 0
    use_prefill: bool = True
    model_identity: str = ""
    prefilled: Prefilled | None = None
    route: Route | None = None
    prompt: RoutedPrompt = field(init=False)
    _on_wire: dict[Backend, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Makes the prompt for routing; its digests are computed when a policy asks for them."""
        self.prompt = RoutedPrompt(self.request)

    @property
    def num_new(self) -> int:
        """Tokens that the current attempt has sent."""
        return len(self.sent) - self.num_before

    @property
    def is_lost_too_often(self) -> bool:
        """True where the request may be why its nodes went away."""
        return self.num_lost > MAX_LOST

    @property
    def is_late(self) -> bool:
        """True where the request took all its time, which is no node's fault."""
        return asyncio.get_running_loop().time() >= self.deadline

    def prompt_on_wire(self, worker: Worker) -> bytes:
        """The prompt, encoded once for all workers of a backend: no attempt changes it."""
        if worker.backend not in self._on_wire:
            self._on_wire[worker.backend] = worker.encode_prompt(self.request)
        return self._on_wire[worker.backend]

    def remaining_s(self) -> float:
        """Raises `DeadlineExceededError` when nothing remains."""
        seconds = self.deadline - asyncio.get_running_loop().time()
        if seconds <= 0:
            raise DeadlineExceededError("the request ran past --request-timeout")
        return seconds

    def begin_attempt(self) -> None:
        """Another attempt, after the tokens that the client has."""
        self.prefilled = None
        self.num_attempts += 1
        if self.num_new:
            # The prompt's log-probabilities came with the first token.
            sampling = structs.replace(self.request.sampling, prompt_logprobs=None)
            self.request = structs.replace(
                self.request, sampling=sampling, output_token_ids=tuple(self.sent)
            )
            self.prompt = RoutedPrompt(self.request)
            self.num_before = len(self.sent)
            self.num_continuations += 1
            self.num_attempts = 1
            self.use_prefill = True

    def release_prefill(self) -> None:
        """Tells P in the background that nobody will pull what it has computed in this attempt."""
        prefilled, self.prefilled = self.prefilled, None
        if prefilled is not None and (held := prefilled.hand_over) is not None:
            prefilled.end_part(asyncio.CancelledError())
            prefilled.node.release(held.engine_id, held.request_id)

    def note_failure(self, engine_id: str, error: TandemError) -> None:
        """This life of a node failed the request."""
        if self.num_new >= INNOCENT_TOKENS:
            self.failed.clear()
            self.num_lost = 0
        self.failed.add(engine_id)
        self.num_lost += isinstance(error, NodeLostError)

    def may_go_on(self, error: TandemError) -> bool:
        """True if another attempt may succeed, should there be a node for it."""
        # Another node would refuse the same request, or break over it too.
        if is_client_fault(error) or is_engine_failure(error) or self.is_lost_too_often:
            return False
        if self.num_new:
            return self.num_continuations < MAX_CONTINUATIONS
        return self.num_attempts < MAX_ATTEMPTS

    def decode_request(self) -> GenerateRequest:
        """The request for D, without what P has answered already."""
        if self.prefilled is None:
            return self.request
        sampling = structs.replace(self.request.sampling, prompt_logprobs=None)
        return structs.replace(self.request, sampling=sampling)

    def num_uncached(self, node: Node) -> int:
        """Tokens that `node` is expected to compute; a D with a prefill computes none."""
        route = self.route
        if route is None or (self.prefilled is not None and node.name == route.decode.name):
            return 0
        hit = route.decode_hit if route.prefill is None else route.prefill_hit
        return self.prompt.num_tokens - hit.resumable
