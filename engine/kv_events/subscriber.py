"""KV events of many publishers, received by one thread and handed to one sink."""

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import zmq

from engine.errors import ConfigError
from engine.kv_events.follower import EventSink, EventSource, Request, SourceFollower, SourceStats
from engine.kv_events.wire import END_SEQUENCE, SEQUENCE_BYTES

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

LIVE_HWM = 4096
"""Batches of one publisher that wait to be read; more wait with it, until it drops some."""
MAX_FRAME_BYTES = 256 * 2**20
"""A longer frame ends its connection and takes no memory; a shorter one may still be refused."""
DEAF_S = 30.0
"""Silence after which a publisher is connected anew: ZeroMQ does not after a breach of protocol."""
MAX_SOCKETS = 16_384
"""Two for each source at most; ZeroMQ's own limit, 1,023, is met at 512 nodes."""
_ANSWER_HWM = 64  # messages of an answer that wait to be read; the publisher keeps the rest
_ROUND = 64  # messages of one socket before the next one has a chance
_TICK_S = 0.1
_HEARTBEAT_MS = 5_000  # a publisher that vanished without a word is connected anew after three
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 2_000
_CLOSE_S = 10.0


class _Connection:
    """The sockets of one source. Once it is added they belong to the subscriber's thread."""

    def __init__(
        self, context: Context, source: EventSource, *, name: str, sink: EventSink
    ) -> None:
        """Raises ConfigError for an address that ZeroMQ does not know; `sink` hears nothing."""
        self.watched: list[Socket] = []  # what the poller knows of it
        self.answers: Socket | None = None
        self._context = context
        self._source = source
        self._asked: Request | None = None
        self.live = self._listen()
        if source.replay_endpoint is not None:  # refuse it now, not when a batch is lost
            self._open(zmq.DEALER, source.replay_endpoint, _ANSWER_HWM).close(0)
        has_replay = source.replay_endpoint is not None
        self.follower = SourceFollower(name, sink, has_replay, now=time.monotonic())

    def ask(self) -> bool:
        """Send the follower's question over a connection that carries no older answer; True if so.

        The socket of the last question is closed then.
        """
        request = self.follower.request
        if request is self._asked:
            return False
        if self.answers is not None:
            self.answers.close(0)
        self._asked, self.answers = request, None
        if request is not None and self._source.replay_endpoint is not None:
            self.answers = self._open(zmq.DEALER, self._source.replay_endpoint, _ANSWER_HWM)
            self.answers.send_multipart([b"", request.word], zmq.NOBLOCK)
        return True

    def listen_anew(self) -> bool:
        """Replace a socket for live batches that is silent for long; True if so."""
        if time.monotonic() < self._heard_at + DEAF_S:
            return False
        self.live.close(0)
        self.live = self._listen()
        return True

    def take(self, ready: Socket) -> bool:
        """Hand the next message of a socket to the follower; False: there is none."""
        try:
            frames = ready.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return False
        # Answers of older publishers have no topic: only the last two frames count.
        number, payload = frames[-2:] if len(frames) in (3, 4) else (b"", b"")
        sequence = int.from_bytes(number, "big", signed=True)
        is_live = ready is self.live
        if is_live:
            self._heard_at = time.monotonic()
        if len(number) != SEQUENCE_BYTES or sequence < (0 if is_live else END_SEQUENCE):
            self.follower.garbled()
        elif is_live:
            self.follower.heard(sequence, payload, time.monotonic())
        else:
            self.follower.answered(sequence, payload, time.monotonic())
        return True

    @property
    def sockets(self) -> list[Socket]:
        """Those to be read."""
        return [self.live] if self.answers is None else [self.live, self.answers]

    def close(self) -> None:
        """Drop both connections, and what is on its way."""
        self.live.close(0)
        if self.answers is not None:
            self.answers.close(0)

    def _listen(self) -> Socket:
        self._heard_at = time.monotonic()
        live = self._open(zmq.SUB, self._source.endpoint, LIVE_HWM)
        live.subscribe(self._source.topic)
        return live

    def _open(self, kind: int, endpoint: str, hwm: int) -> Socket:
        opened = self._context.socket(kind)
        opened.linger = 0
        opened.rcvhwm = hwm
        opened.ipv6 = "[" in endpoint
        opened.maxmsgsize = MAX_FRAME_BYTES
        opened.heartbeat_ivl = _HEARTBEAT_MS
        opened.heartbeat_timeout = 3 * _HEARTBEAT_MS
        opened.reconnect_ivl = _RECONNECT_MS
        opened.reconnect_ivl_max = _MAX_RECONNECT_MS
        try:
            opened.connect(endpoint)
        except zmq.ZMQError as error:
            opened.close(0)
            raise ConfigError(f"cannot subscribe to {endpoint}: {error}") from error
        return opened


class EventSubscriber:
    """Follows publishers from a thread of its own until `close`; the methods are for any thread.

    `sink` is called by one thread at a time, never for a name that was removed.
    """

    def __init__(self, sink: EventSink) -> None:
        self._sink = sink
        self._context = Context()
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        # Guards the connections, their followers and every call of the sink. A thread that holds
        # it handles one message at most.
        self._lock = threading.Lock()
        self._connections: dict[str, _Connection] = {}
        self._removed: list[_Connection] = []
        self._by_socket: dict[Socket, _Connection] = {}  # of the thread alone
        self._poller = zmq.Poller()
        self._is_closing = False
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-events-subscriber", daemon=True)
        self._thread.start()

    def add(self, name: str, source: EventSource) -> None:
        """Follow one more publisher, or the one of this name at another address.

        Raises ConfigError for an address that ZeroMQ does not know.
        """
        with self._lock:
            added = _Connection(self._context, source, name=name, sink=self._sink)
            self._drop(name)
            self._connections[name] = added
        self._wake_up()

    def remove(self, name: str) -> None:
        """Stop following. What the sink knows of `name` stays. Idempotent."""
        with self._lock:
            self._drop(name)
        self._wake_up()

    def stats(self, name: str) -> SourceStats:
        """The counters of a source. Raises KeyError for a name that is not followed."""
        with self._lock:
            return self._connections[name].follower.stats

    def close(self) -> None:
        """End the thread and all connections. Idempotent."""
        self._is_closing = True
        self._wake_up()
        self._thread.join(_CLOSE_S)
        self._wake.close()
        self._woken.close()
        self._context.destroy(linger=0)

    def _drop(self, name: str) -> None:
        if (dropped := self._connections.pop(name, None)) is not None:
            self._removed.append(dropped)

    def _wake_up(self) -> None:
        # Closed, or so many bytes are unread that the thread wakes anyway.
        with suppress(OSError):
            self._wake.send(b"\0")

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        tick_at = 0.0
        while not self._is_closing:
            ready = {each for each, _ in self._poller.poll(int(1000 * _TICK_S))}
            if self._woken.fileno() in ready:
                self._settle()
                tick_at = 0.0
            for each in ready & self._by_socket.keys():
                self._read(each)
            now = time.monotonic()
            if now >= tick_at:
                self._tick(now)
                tick_at = now + _TICK_S

    def _settle(self) -> None:
        """Open and close what other threads have added and removed."""
        with suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with self._lock:
            removed, self._removed = self._removed, []
            wanted = list(self._connections.values())
        for connection in removed:
            self._watch(connection, [])
            connection.close()
        for connection in wanted:
            self._watch(connection, connection.sockets)

    def _read(self, ready: Any) -> None:
        """Hand on what has come, a limited number of messages."""
        connection = self._by_socket.get(ready)
        if connection is None:
            return
        for _ in range(_ROUND):
            if self._is_closing:
                return
            with self._lock:
                if not self._is_followed(connection) or not connection.take(ready):
                    return
                has_changed = connection.ask()
            if has_changed:
                self._watch(connection, connection.sockets)
                return

    def _tick(self, now: float) -> None:
        for connection in set(self._by_socket.values()):
            with self._lock:
                if not self._is_followed(connection):
                    continue
                connection.follower.tick(now)
                has_changed = connection.ask() | connection.listen_anew()
            if has_changed:
                self._watch(connection, connection.sockets)

    def _is_followed(self, connection: _Connection) -> bool:
        return self._connections.get(connection.follower.name) is connection

    def _watch(self, connection: _Connection, wanted: Sequence[Socket]) -> None:
        """Poll exactly `wanted` for this connection."""
        for gone in set(connection.watched).difference(wanted):
            del self._by_socket[gone]
            self._poller.unregister(gone)
        for new in set(wanted).difference(connection.watched):
            self._by_socket[new] = connection
            self._poller.register(new, zmq.POLLIN)
        connection.watched = list(wanted)
