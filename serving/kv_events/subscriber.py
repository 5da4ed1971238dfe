"""KV events of many publishers, received by one thread and handed to one sink."""

import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

import zmq

from engine.errors import ConfigError, KVEventError
from serving.kv_events.follower import EventSink, EventSource, Question, SourceFollower, SourceStats
from serving.kv_events.wire import END_SEQUENCE, MAX_PAYLOAD_BYTES, SEQUENCE_BYTES
from serving.kv_events.zmtp import Channel, Context, Kind, Socket, encoded

DEAF_S = 30.0
"""Silence after which a publisher is connected anew."""
MAX_SOCKETS = 16_384
"""Two for each source at most; ZeroMQ's own limit, 1,023, is met at 512 nodes."""
MAX_MESSAGE_BYTES = MAX_PAYLOAD_BYTES + 64 * 2**10
"""A longer message ends its connection; what it is about counts as lost."""
_ROUND = 64  # messages and chunks of one connection before the next one has a chance
_TICK_S = 0.1
_PAUSE_S = 0.5  # from a connection that has ended to the next one
_CLOSE_S = 10.0


class _Connection:
    """The channels of one source. Once it is added they belong to the subscriber's thread."""

    def __init__(
        self, context: Context, source: EventSource, *, name: str, sink: EventSink
    ) -> None:
        """Raises ConfigError for an address that ZeroMQ does not know; `sink` hears nothing."""
        self.watched: list[Channel] = []  # what the poller knows of it
        self.answers: Channel | None = None
        self._context = context
        self._source = source
        self._topic = source.topic.encode()
        self._asked: Question | None = None
        self.live = self._listen()
        if source.replay_endpoint is not None:  # refuse it now, not when a batch is lost
            try:
                self._open("DEALER", source.replay_endpoint, b"").close()
            except ConfigError:
                self.live.close()
                raise
        has_replay = source.replay_endpoint is not None
        self.follower = SourceFollower(
            name, sink, has_replay, now=time.monotonic(), is_foreign=source.is_foreign
        )

    def ask(self) -> None:
        """Send the follower's question over a new connection, which carries no older answer."""
        question = self.follower.question
        if question is self._asked:
            return
        if self.answers is not None:
            self.answers.close()
        self._asked, self.answers = question, None
        if question is not None and self._source.replay_endpoint is not None:
            asked = encoded(b"", question.word)
            self.answers = self._open("DEALER", self._source.replay_endpoint, asked)

    def listen_anew(self) -> None:
        """Replace a channel for live batches that has ended, or is silent for long."""
        if time.monotonic() >= self._anew_at:
            self.live.close()
            self.live = self._listen()

    def take(self, ready: Channel) -> bool:
        """Hand the next message of a channel to the follower; False: nothing has come."""
        try:
            message = ready.next()
        except KVEventError:
            self.follower.garbled()
            self._end(ready)
            return False
        if message is not None:
            self._hear(message, is_live=ready is self.live)
            return True
        has_come = ready.receive()
        if ready.is_over:
            self._end(ready)
        return has_come

    @property
    def channels(self) -> list[Channel]:
        """The connections to be read."""
        return [each for each in (self.live, self.answers) if each and not each.socket.closed]

    def close(self) -> None:
        """Drop both connections, and what is on its way."""
        self.live.close()
        if self.answers is not None:
            self.answers.close()

    def _hear(self, message: list[bytes], *, is_live: bool) -> None:
        now = time.monotonic()
        if is_live:
            self._anew_at = now + DEAF_S
            if not message[0].startswith(self._topic):
                return
        # Answers of older publishers have no topic: only the last two frames count.
        number, payload = message[-2:] if len(message) in (3, 4) else (b"", b"")
        sequence = int.from_bytes(number, "big", signed=True)
        if len(number) != SEQUENCE_BYTES or sequence < (0 if is_live else END_SEQUENCE):
            self.follower.garbled()
        elif is_live:
            self.follower.heard(sequence, payload, now)
        else:
            self.follower.answered(sequence, payload, now)

    def _end(self, channel: Channel) -> None:
        """A channel is of no more use. What it would have answered runs into its deadline."""
        channel.close()
        if channel is self.live:
            self._anew_at = time.monotonic() + _PAUSE_S

    def _listen(self) -> Channel:
        self._anew_at = time.monotonic() + DEAF_S
        # The first byte says that the rest is a topic to subscribe to.
        return self._open("SUB", self._source.endpoint, encoded(b"\1" + self._topic))

    def _open(self, kind: Kind, endpoint: str, first: bytes) -> Channel:
        return Channel(self._context, endpoint, kind=kind, first=first, max_bytes=MAX_MESSAGE_BYTES)


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
        # Of the thread alone, as are those with messages that have come and had no turn yet.
        self._by_socket: dict[Socket, tuple[_Connection, Channel]] = {}
        self._unread: set[Socket] = set()
        self._poller = zmq.Poller()
        self._is_closing = False
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._poller.register(self._woken, zmq.POLLIN)
        self._thread = threading.Thread(target=self._run, name="kv-events-subscriber", daemon=True)
        self._thread.start()

    def add(self, name: str, source: EventSource, sink: EventSink | None = None) -> None:
        """Follow one more publisher, or the one of this name at another address.

        `sink`: for this one alone. Raises ConfigError for an address that ZeroMQ does not know.
        """
        with self._lock:
            added = _Connection(self._context, source, name=name, sink=sink or self._sink)
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
            pause_s = 0.0 if self._unread else _TICK_S
            ready = {each for each, _ in self._poller.poll(int(1000 * pause_s))} | self._unread
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
            self._watch(connection, connection.channels)

    def _read(self, ready: Socket) -> None:
        """Hand on what has come, a limited number of messages."""
        self._unread.discard(ready)
        connection, channel = self._by_socket.get(ready, (None, None))
        if connection is None or channel is None:
            return
        for _ in range(_ROUND):
            if self._is_closing:
                return
            with self._lock:
                if not self._is_followed(connection):
                    return
                has_more = connection.take(channel)
                connection.ask()
                wanted = connection.channels
            if wanted != connection.watched:
                self._watch(connection, wanted)
            if not has_more or channel not in wanted:
                return
        self._unread.add(ready)

    def _tick(self, now: float) -> None:
        with self._lock:
            connections = list(self._connections.values())
        for connection in connections:
            with self._lock:
                if not self._is_followed(connection):
                    continue
                connection.follower.tick(now)
                connection.ask()
                connection.listen_anew()
                wanted = connection.channels
            if wanted != connection.watched:
                self._watch(connection, wanted)

    def _is_followed(self, connection: _Connection) -> bool:
        return self._connections.get(connection.follower.name) is connection

    def _watch(self, connection: _Connection, wanted: Sequence[Channel]) -> None:
        """Poll exactly `wanted` for this connection."""
        for gone in set(connection.watched).difference(wanted):
            del self._by_socket[gone.socket]
            self._unread.discard(gone.socket)
            self._poller.unregister(gone.socket)
        for new in set(wanted).difference(connection.watched):
            self._by_socket[new.socket] = connection, new
            self._poller.register(new.socket, zmq.POLLIN)
        connection.watched = list(wanted)
