"""One node as the proxy sees it: its worker, description and load. Knows no other node."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

import structlog

from engine.errors import DeadlineExceededError, TandemError
from proxy.backends.worker import UNKNOWN, Worker
from proxy.cluster.prefill_queue import PrefillQueue
from proxy.errors import is_node_failure
from serving.breaker import Breaker
from serving.hand_over_problems import HandOverProblems
from serving.rpc.messages import NodeInfo

log = structlog.get_logger()

# A node that computes a long step answers late; only longer silence counts as absence.
MAX_LATE_ANSWERS: Final = 3
NOT_YET: Final = "has not answered yet"
MAX_RELEASES: Final = 256
RELEASE_TIMEOUT_S: Final = 2.0


class NodeKind(StrEnum):
    """The part of a request that a node computes for the proxy."""

    PREFILL = "prefill"
    DECODE = "decode"


class Stage(StrEnum):
    """How far a node is.

        away ──answers──▶ warming ──a canary worked──▶ serving ──drains──▶ leaving
          ▲                  │                            │
          └──────────────── stays silent ─────────────────┘

    Only a node that serves gets requests. Those of the proxy's options need no canary.
    """

    AWAY = "away"
    WARMING = "warming"
    SERVING = "serving"
    LEAVING = "leaving"


@dataclass(slots=True, frozen=True)
class NodeView:
    """A snapshot of one usable node, for routing policies. `name` is its URL.

    `info` is what the node said last. `num_in_flight` counts this proxy's requests on it, and
    `num_tokens_in_flight` the prompt tokens that it still computes for them.
    """

    name: str
    info: NodeInfo
    num_in_flight: int
    num_tokens_in_flight: int = 0


class Node:
    """Owns the worker of one node. `info` is its last answer; `problem` says why it is unused.

    `name` is its URL, for operators. `label` names it where everybody may look, such as "d0".
    `needs_canary`: each of its lives serves only after `warmed`. `refusals`: the hand-overs that
    this node, a D, would not take.
    """

    def __init__(
        self, name: str, kind: NodeKind, worker: Worker, *, label: str, needs_canary: bool = False
    ) -> None:
        self.name = name
        self.label = label
        self.kind = kind
        self.worker = worker
        self.info = UNKNOWN
        self.problem: str | None = NOT_YET
        self._num_in_flight = 0
        self._prompts = PrefillQueue()
        self._view: NodeView | None = None
        self._num_late = 0
        self._needs_canary = needs_canary
        self._warm_id = ""
        self._is_leaving = False
        self.refusals = HandOverProblems()
        self._breaker = Breaker()
        self._releases: set[asyncio.Task[None]] = set()

    @property
    def is_available(self) -> bool:
        return self.stage is Stage.SERVING

    @property
    def answers(self) -> bool:
        """True while nothing is wrong with the node, whether or not it may have requests."""
        return self.problem is None

    @property
    def stage(self) -> Stage:
        if self._is_leaving:
            return Stage.LEAVING
        if self.problem is not None:
            return Stage.AWAY
        is_warm = not self._needs_canary or self._warm_id == self.info.engine_id
        return Stage.SERVING if is_warm else Stage.WARMING

    @property
    def num_in_flight(self) -> int:
        """This proxy's requests on the node."""
        return self._num_in_flight

    @property
    def rests(self) -> bool:
        """True while its requests fail in a row, whatever it says of itself."""
        return self._breaker.rest_s > 0

    @property
    def view(self) -> NodeView:
        # Every request asks for the views of all nodes, of which few have changed since the last;
        # those that compute prompts always have.
        if self._view is None or self._prompts:
            left = self._prompts.num_tokens_left(self.info.prefill_tokens_per_s)
            self._view = NodeView(self.name, self.info, self._num_in_flight, left)
        return self._view

    def warmed(self, engine_id: str) -> None:
        """A canary has worked in this life of the node."""
        if self._warm_id != engine_id:
            log.info("node is warm", node=self.name, kind=self.kind, engine_id=engine_id)
        self._warm_id = engine_id

    def leaves(self, is_leaving: bool) -> None:
        """The node gets no new request while it leaves; those that it has go on."""
        if is_leaving and not self._is_leaving:
            log.info(
                "node leaves", node=self.name, kind=self.kind, num_in_flight=self.num_in_flight
            )
        self._is_leaving = is_leaving

    def begin(self) -> None:
        """A request of this proxy begins; `end` follows, unless its client leaves too early."""
        self._breaker.began()

    def end(self, failure: TandemError | None) -> None:
        """A request ended: well, or by a `failure`, which may be the node's or not."""
        if failure is None:
            self._breaker.worked()
        elif not is_node_failure(failure):
            self._breaker.unjudged()
        elif self._breaker.failed():
            log.warning("node rests: its requests fail in a row", node=self.name, kind=self.kind)

    @contextmanager
    def carrying(self, num_tokens: int = 0) -> Iterator[None]:
        """Counts one request of this proxy, and prompt tokens to compute, as in flight here."""
        self._num_in_flight += 1
        self._view = None
        try:
            with self._prompts.carrying(num_tokens):
                yield
        finally:
            self._num_in_flight -= 1
            self._view = None

    async def refresh(self, timeout_s: float) -> NodeInfo | None:
        """Asks the node what it is; None, with `problem` set, when it is away or not ready."""
        answered = self.answers
        try:
            info = await self.worker.describe(timeout_s, is_lost=not answered)
        except DeadlineExceededError as error:
            self._num_late += 1
            # One late answer is no absence, but a node that never answered was never there.
            if self._num_late >= MAX_LATE_ANSWERS or self.info is UNKNOWN:
                self.set_problem(str(error))
                self.cut_off()
            return None
        except TandemError as error:
            self.set_problem(str(error))
            return None
        if answered and not self.answers:
            # A request has lost the node since: the answer is older, and may be its last.
            return None
        self._num_late = 0
        if info.engine_id != self.info.engine_id:
            self._breaker.worked()
        self.info, self._view = info, None
        if not info.ready:
            self.set_problem(f"is not ready: {info.reason}")
            return None
        return info

    def set_problem(self, problem: str | None) -> None:
        """Takes the node out of use, or with None back into use; logs a change."""
        if problem is not None and self.problem in (None, NOT_YET):
            log.warning("node is out of use", node=self.name, kind=self.kind, problem=problem)
        if problem is None and self.problem is not None:
            log.info("node is in use", node=self.name, kind=self.kind)
        self.problem = problem

    def on_sign_of_life(self) -> None:
        """The node sent something, so it is not absent, however late it answers `Describe`."""
        self._num_late = 0

    def cut_off(self) -> None:
        """Ends every request of this proxy on the node, which hangs or is out of time."""
        self.worker.cut_off()

    def release(self, engine_id: str, request_id: str) -> None:
        """Tells the node, in the background, that nobody will pull a prefill.

        A task, because a cancelled request cannot await. Best effort: the lease ends anyway.
        """
        if len(self._releases) < MAX_RELEASES:
            task = asyncio.create_task(self._release(engine_id, request_id))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, engine_id: str, request_id: str) -> None:
        try:
            await self.worker.release(engine_id, request_id, RELEASE_TIMEOUT_S)
        except TandemError as error:
            log.info("prefill is left to its lease", node=self.name, problem=str(error))

    async def close(self) -> None:
        """Waits for releases, of which each has its own short deadline."""
        await asyncio.gather(*self._releases)
        await self.worker.close()
