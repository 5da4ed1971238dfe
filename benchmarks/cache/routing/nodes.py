"""Prefill and decode nodes with real caches and fake compute, and the proxy's view of each."""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from benchmarks.cache.decode_replay import DecodeNode
from benchmarks.cache.geometries import Geometry
from benchmarks.cache.prefill_replay import POLICIES, PrefillNode
from benchmarks.cache.routing.agenda import Agenda
from benchmarks.cache.routing.event_feed import EventFeed
from benchmarks.cache.routing.requests import Request
from engine.kv_cache.arena_plan import ArenaPlan
from proxy.cluster.node import NodeView
from proxy.cluster.prefill_queue import PrefillQueue
from serving.kv_events.recorder import AnnouncedGroup, EventRecorder
from serving.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo

GROUPS = ("mamba", "full_attention")
TOKEN_S = 0.02
"""Seconds per token of an answer, however many requests share the node."""


@dataclass(slots=True, frozen=True)
class Hardware:
    """The hardware of every node: model, memory, rates, and answers that it decodes at once."""

    geometry: Geometry
    memory_bytes: int
    prefill_tokens_per_s: float
    hash_block_size: int = 16
    link_bytes_per_s: float = 5e9
    num_slots: int = 16

    def plan(self) -> ArenaPlan:
        """The units of one node."""
        return self.geometry.units(self.memory_bytes, self.hash_block_size)

    def recorder(self) -> EventRecorder:
        """A listener that turns what a cache announces into events."""
        return EventRecorder([AnnouncedGroup(kind) for kind in GROUPS], self.hash_block_size)

    def describe(self, name: str) -> NodeInfo:
        """The description that a node gives of itself, its queue apart."""
        return NodeInfo(
            engine_id=name,
            kind="",
            model_names=("simulated",),
            max_model_len=1 << 20,
            vocab_size=1 << 20,
            ready=True,
            prefill_tokens_per_s=self.prefill_tokens_per_s,
            decode_tokens_per_s=self.num_slots / TOKEN_S,
            link_bytes_per_s=self.link_bytes_per_s,
            kv_bytes_per_token=self.geometry.token_bytes,
            state_bytes=self.geometry.state_bytes,
            kv_events=self.events(),
        )

    def events(self) -> KVEventsInfo:
        """The description that a node gives of its events."""
        return KVEventsInfo(
            endpoint="inproc://none",
            hash_block_size=self.hash_block_size,
            groups=tuple(KVGroupInfo(kind=kind) for kind in GROUPS),
        )


class Prefiller:
    """One queue, first come first served: a prompt takes its uncached tokens by the rate."""

    def __init__(self, hardware: Hardware, agenda: Agenda, feed: EventFeed) -> None:
        self._rate = hardware.prefill_tokens_per_s
        self._agenda = agenda
        self._feed = feed
        self._events = hardware.recorder()
        self._node = PrefillNode(hardware.plan(), POLICIES["default"], listener=self._events)
        self._waiting: deque[tuple[Request, Callable[[int], None]]] = deque()
        self._busy_until = 0.0
        self._is_busy = False

    def submit(self, request: Request, done: Callable[[int], None]) -> None:
        """Calls `done` with the hit when the prompt is computed."""
        self._waiting.append((request, done))
        if not self._is_busy:
            self._start()

    @property
    def num_requests(self) -> int:
        """Requests that wait or are computed now."""
        return len(self._waiting) + self._is_busy

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens not computed yet. What a waiting prompt will hit is not known before it starts."""
        waiting = sum(request.prompt.num_tokens for request, _ in self._waiting)
        return waiting + round(max(0.0, self._busy_until - self._agenda.now) * self._rate)

    def _start(self) -> None:
        request, done = self._waiting.popleft()
        hit = self._node.serve(request.prompt)
        self._is_busy = True
        seconds = (request.prompt.num_tokens - hit) / self._rate
        self._busy_until = self._agenda.now + seconds
        self._agenda.after(seconds, lambda: self._finish(lambda: done(hit)))

    def _finish(self, done: Callable[[], None]) -> None:
        self._is_busy = False
        self._feed.send(self._events.take())
        done()
        if self._waiting and not self._is_busy:
            self._start()


class Decoder:
    """One link, pulls one after another, then a slot for as long as the answer takes."""

    def __init__(self, hardware: Hardware, agenda: Agenda, feed: EventFeed) -> None:
        self._hardware = hardware
        self._agenda = agenda
        self._feed = feed
        self._events = hardware.recorder()
        self._node = DecodeNode(hardware.plan(), listener=self._events)
        self._link_free_at = 0.0
        self._num_free = hardware.num_slots
        self._waiting: deque[Callable[[], None]] = deque()

    def submit(
        self, request: Request, first_token: Callable[[], None], over: Callable[[], None]
    ) -> None:
        """Calls `first_token` when the answer begins, and `over` when it has ended."""
        size, geometry = request.prompt.num_tokens, self._hardware.geometry
        with self._node.serving(request.hand_over) as (_, (state, attention)):
            num_bytes = (size - attention) * geometry.token_bytes
            num_bytes += geometry.state_bytes if state < size else 0
        events = self._events.take()
        seconds = num_bytes / self._hardware.link_bytes_per_s
        self._link_free_at = max(self._link_free_at, self._agenda.now) + seconds

        def begin() -> None:
            first_token()
            self._agenda.after(request.output_length * TOKEN_S, lambda: self._end(over))

        def pulled() -> None:
            self._feed.send(events)
            self._waiting.append(begin)
            self._fill()

        self._agenda.after(self._link_free_at - self._agenda.now, pulled)

    def _end(self, over: Callable[[], None]) -> None:
        self._num_free += 1
        over()
        self._fill()

    def _fill(self) -> None:
        while self._waiting and self._num_free:
            self._num_free -= 1
            self._waiting.popleft()()


class KnownNode:
    """The proxy's view of a node: its own counts at once, the node's reports when it polls."""

    def __init__(self, name: str, hardware: Hardware, agenda: Agenda) -> None:
        self.info = hardware.describe(name)
        self._prompts = PrefillQueue(clock=lambda: agenda.now)
        self._num_in_flight = 0

    def hear(self, *, num_requests: int, num_waiting_tokens: int) -> None:
        """Takes the node's report of what waits there."""
        self.info = msgspec.structs.replace(
            self.info, num_requests_waiting=num_requests, num_waiting_tokens=num_waiting_tokens
        )

    @contextmanager
    def carrying(self, num_tokens: int) -> Iterator[None]:
        """One more request, with prompt tokens to compute, until the block ends."""
        self._num_in_flight += 1
        with self._prompts.carrying(num_tokens):
            yield
        self._num_in_flight -= 1

    def view(self) -> NodeView:
        """The node as a policy sees it now."""
        left = self._prompts.num_tokens_left(self.info.prefill_tokens_per_s)
        return NodeView(self.info.engine_id, self.info, self._num_in_flight, left)
