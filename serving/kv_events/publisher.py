"""KV events over ZeroMQ: a PUB socket, and a ROUTER that repeats batches and gives snapshots.

The frames are vLLM's. Live: topic, sequence (8 bytes, big-endian), payload. A request to the ROUTER
is an empty frame and the first sequence to repeat, or the word `snapshot`, which no sequence is;
its answer is a number of messages of an empty frame, topic, sequence and payload, of which the last
has the sequence -1 and no payload.
"""

import errno
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import zmq

from engine.errors import ConfigError
from serving.config import KVEventsConfig
from serving.kv_events.event_log import EventLog, NumberedPayload
from serving.kv_events.wire import END_SEQUENCE, SEQUENCE_BYTES, SNAPSHOT, Event

Context = zmq.Context[zmq.Socket[bytes]]

HEARTBEAT_MS = 5_000
"""Silence after which a connection is tried; one that is dead is dropped after three of them."""
MAX_ANSWERS = 16
"""Requests that are answered at a time; whoever comes then asks again."""
MAX_FRAME_BYTES = 512
"""Of what others may send to a publisher: topics, and requests of 8 bytes."""
LAST_BATCHES_S = 2.0
"""From `close` on; what still waits after that is not sent."""
_ANSWER_HWM = 64  # messages that wait for one slow asker; each is at most some hundred KiB
_ROUND = 64  # live batches, or requests, before anybody else has a chance
_ANSWER_ROUND = 4  # messages of one answer; those of a snapshot take milliseconds to make
_RETRY_S = 0.01  # how long an answer rests when its asker takes no more
_STALLED_S = 10.0  # an asker that takes nothing for so long gets no more
_POLL_S = 1.0
_END = NumberedPayload(END_SEQUENCE, b"")
_CLOSE_S = 10.0


def listens(endpoint: str) -> bool:
    """True if a publisher binds to the address, by vLLM's rule; else it connects to a collector."""
    has_wildcard = any(sign in endpoint for sign in ("*", "::"))
    return has_wildcard or endpoint.startswith("ipc://") or endpoint.endswith(":0")


def reachable(endpoint: str, host: str) -> str:
    """An address as others can use it: `host` in place of all addresses of this machine."""
    scheme, _, rest = endpoint.partition("://")
    own, _, port = rest.rpartition(":")
    if scheme != "tcp" or own not in ("*", "0.0.0.0", "[::]"):
        return endpoint
    return f"tcp://{f'[{host}]' if ':' in host else host}:{port}"


@dataclass(slots=True)
class _Answer:
    """Messages for one asker that were not sent yet; `next` is the one that it did not take."""

    asker: bytes
    rest: Iterator[NumberedPayload]
    next: NumberedPayload | None = None
    moved_at: float = field(default_factory=time.monotonic)


class EventPublisher:
    """Publishes from a thread of its own until `close`. `publish` belongs to one other thread.

    `endpoint`, `replay_endpoint`: the addresses that it listens on, with their ports. `endpoint` is
    None where the publisher connects to a collector.
    """

    def __init__(self, config: KVEventsConfig, incarnation: str, host: str = "127.0.0.1") -> None:
        """`host`: where it listens if the config names no address. Raises ConfigError."""
        self._topic = config.topic.encode()
        self._log = EventLog(
            incarnation,
            form=config.encoding,
            buffer_steps=config.buffer_steps,
            max_queue_size=config.max_queue_size,
        )
        self._answers: deque[_Answer] = deque()
        self._is_stuck = False  # none of the askers takes more at the moment
        self._close_by = inf  # monotonic seconds
        any_port = f"tcp://{f'[{host}]' if ':' in host else host}:0"
        self._context = Context()
        self._publish = self._context.socket(zmq.PUB)
        self._replay = self._context.socket(zmq.ROUTER)
        self._publish.sndhwm = config.hwm
        self._replay.sndhwm = _ANSWER_HWM
        # Without it an asker that left, or takes nothing, would be no error.
        self._replay.router_mandatory = True
        try:
            self.endpoint = _open(self._publish, config.endpoint or any_port)
            self.replay_endpoint = _open(self._replay, config.replay_endpoint or any_port, True)
        except ConfigError:
            self._context.destroy(linger=0)
            raise
        self._wake, self._woken = socket.socketpair()
        for end in (self._wake, self._woken):
            end.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="kv-events-publisher", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Batches that found the queue full: consumers fetch a snapshot for each gap."""
        return self._log.num_dropped

    def publish(self, events: Sequence[Event]) -> None:
        """Hand over what one step has changed. Never waits for a consumer or the network."""
        self._log.append(events)
        self._wake_up()

    def close(self) -> None:
        """Send what is waiting, for at most `LAST_BATCHES_S`, and end the thread. Idempotent."""
        self._close_by = min(self._close_by, time.monotonic() + LAST_BATCHES_S)
        self._wake_up()
        self._thread.join(_CLOSE_S)
        self._wake.close()
        self._woken.close()
        self._context.destroy(linger=0)

    def _wake_up(self) -> None:
        # Closed, or so many bytes are unread that the thread wakes anyway.
        with suppress(OSError):
            self._wake.send(b"\0")

    # --- the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._woken, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while True:
            is_busy = not self._log.is_empty or (self._answers and not self._is_stuck)
            pause_s = 0.0 if is_busy else _RETRY_S if self._answers else _POLL_S
            ready = dict(poller.poll(int(1000 * pause_s)))
            with suppress(BlockingIOError):
                while self._woken.recv(4096):
                    pass
            # First, so that batch 0 is in every answer: a state before it would have no number.
            self._send_live()
            if self._is_late or (self._close_by < inf and self._log.is_empty):
                return
            if self._replay in ready:
                self._take_requests()
            self._send_answers()

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._close_by

    def _send_live(self) -> None:
        for _ in range(_ROUND):
            # Sockets are closed after this thread: it must not outlast their owner's wait for it.
            batch = None if self._is_late else self._log.take()
            if batch is None:
                return
            # A subscriber whose queue is full loses the batch and sees it by the next number.
            self._publish.send_multipart([self._topic, *_frames(batch)], zmq.NOBLOCK)

    def _take_requests(self) -> None:
        for _ in range(_ROUND):
            try:
                frames = self._replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            asker, empty, word = frames if len(frames) == 3 else (b"", b"", b"")
            is_request = not empty and len(word) == SEQUENCE_BYTES
            # One answer for each asker, or one that reads nothing could use up all.
            is_busy = len(self._answers) >= MAX_ANSWERS or any(
                answer.asker == asker for answer in self._answers
            )
            if not is_request or is_busy:
                continue
            start = int.from_bytes(word, "big")
            rest = self._log.snapshot() if word == SNAPSHOT else self._log.replay(start)
            self._answers.append(_Answer(asker, rest))

    def _send_answers(self) -> None:
        """A few messages of each answer, so that neither live batches nor other askers wait."""
        self._is_stuck = True
        for _ in range(len(self._answers)):
            answer = self._answers.popleft()
            if self._send_some(answer):
                self._answers.append(answer)

    def _send_some(self, answer: _Answer) -> bool:
        """False when the answer is complete, or nobody takes it."""
        for _ in range(_ANSWER_ROUND):
            batch = answer.next = answer.next or next(answer.rest, _END)
            topic = b"" if batch is _END else self._topic
            try:
                self._replay.send_multipart(
                    [answer.asker, b"", topic, *_frames(batch)], zmq.NOBLOCK
                )
            except zmq.Again:
                return time.monotonic() - answer.moved_at < _STALLED_S
            except zmq.ZMQError as error:
                if error.errno != errno.EHOSTUNREACH:
                    raise
                return False
            if batch is _END:
                return False
            answer.next, answer.moved_at = None, time.monotonic()
            self._is_stuck = False
        return True


def _frames(batch: NumberedPayload) -> tuple[bytes, bytes]:
    return batch.sequence.to_bytes(SEQUENCE_BYTES, "big", signed=True), batch.payload


def _open(sock: zmq.Socket[bytes], endpoint: str, only_listens: bool = False) -> str | None:
    """Listen, and return the real address; or connect, and return None."""
    sock.linger = 0
    sock.ipv6 = "[" in endpoint
    sock.maxmsgsize = MAX_FRAME_BYTES
    sock.heartbeat_ivl = HEARTBEAT_MS
    sock.heartbeat_timeout = 3 * HEARTBEAT_MS
    try:
        if only_listens or listens(endpoint):
            sock.bind(endpoint)
            bound = sock.get_string(zmq.LAST_ENDPOINT)
            if bound.startswith("ipc:///"):  # events tell prompts: the umask does not decide who
                os.chmod(bound.removeprefix("ipc://"), 0o600)
            return bound
        sock.connect(endpoint)
    except (zmq.ZMQError, OSError) as error:
        raise ConfigError(f"kv_events_config: cannot open {endpoint}: {error}") from error
    return None
