"""The owner's side of the ucx transport: a thread that answers requests for parts of its memory.

Knows frames and regions, and no readers by name. A reader with the token of this incarnation may
read inside the regions, and nothing else is looked at before the token is right.
"""

import ctypes
import hashlib
import hmac
import os
import secrets
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain, count
from threading import Thread
from typing import Annotated, Any

import msgspec
import numpy as np
import structlog

from connector.transports.address import Natural, RegionNumber, RegionSizes
from connector.transports.base import check_pieces
from connector.transports.ucx_worker import Bytes, Request, UcxWorker, wait_readable
from engine.arena import ArenaMemory
from engine.errors import TransportError
from engine.struct_types import learned

MAX_FRAME_BYTES = 64 * 1024
MAX_PART_BYTES = 8 << 20
MAX_PART_SPANS = 1024
MAX_PARTS_IN_FLIGHT = 8
"""Parts that one reader may have asked for and not received."""

REQUEST_TAG = 1
REFUSAL_BYTES = 256
MAX_READERS = 256
_PATROL_S = 1.0  # how long the thread sleeps when nothing happens
_STOP_S = 10.0
_PREFIX = struct.Struct("<I")

Token = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
WorkerAddress = Annotated[bytes, msgspec.Meta(min_length=1, max_length=16 * 1024)]
_Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_PART_BYTES)]


class UcxAddress(msgspec.Struct, frozen=True, tag_field="transport", tag="ucx"):
    """A peer's serving worker and its memory; `token` is new in each life and goes into requests.

    `digest` covers the rest: UCX 1.21 aborts the process that parses a damaged worker address.
    That is against damage, not against malice: addresses must come from members of the cluster.
    """

    worker: WorkerAddress
    token: Token
    nbytes: RegionSizes
    digest: Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]

    @classmethod
    def of(cls, worker: bytes, token: bytes, nbytes: tuple[int, ...]) -> "UcxAddress":
        """With its digest."""
        return cls(worker, token, nbytes, _digest_of(worker, token, nbytes))

    def __post_init__(self) -> None:
        if self.digest != _digest_of(self.worker, self.token, self.nbytes):
            raise ValueError("it does not match its digest, so it was damaged")


def _digest_of(worker: bytes, token: bytes, nbytes: tuple[int, ...]) -> bytes:
    whole = worker + token + b"".join(size.to_bytes(8) for size in nbytes)
    return hashlib.blake2b(whole, digest_size=16).digest()


class PartRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for `spans` (offset, length) of one of the owner's regions.

    Joined they come as one message at `tag`, else one by one at `tag`, `tag` + 1 and so on. A
    refusal goes to `refusal_tag`, as text padded with zeros to REFUSAL_BYTES.
    """

    token: Token
    reader: WorkerAddress
    tag: Natural
    refusal_tag: Natural
    spans: Annotated[
        list[tuple[Natural, _Length]], msgspec.Meta(min_length=1, max_length=MAX_PART_SPANS)
    ]
    joined: bool
    region: RegionNumber = 0


class _Reader(msgspec.Struct):
    """The connection to one reader, and the messages under way to it, by part."""

    endpoint: Any
    sends: list[list[Request]] = msgspec.field(default_factory=list)


def encode_frame(request: PartRequest) -> Bytes:
    """The frame as a message; its length goes first, as the receiver is not told it."""
    body = msgspec.msgpack.encode(request)
    return np.frombuffer(_PREFIX.pack(len(body)) + body, dtype=np.uint8)


def decode_frame(frame: memoryview) -> PartRequest:
    """Raises TransportError for anything that is not a whole PartRequest."""
    (length,) = _PREFIX.unpack_from(frame)
    if length > len(frame) - _PREFIX.size:
        raise TransportError(f"a frame of {length} B is over {MAX_FRAME_BYTES} B")
    body = frame[_PREFIX.size : _PREFIX.size + length]
    try:
        return msgspec.msgpack.decode(body, type=learned(PartRequest))
    except msgspec.DecodeError as error:
        raise TransportError(f"not a request for a part: {error}") from error


class ArenaServer:
    """Serves `regions` from its own thread until `close`; the owner's engine does nothing."""

    def __init__(self, regions: Sequence[ArenaMemory], host: str) -> None:
        self._token = secrets.token_bytes(16)
        self._regions: list[Bytes] = [region.tensor.numpy() for region in regions]
        self._worker = UcxWorker(host)
        self._sizes = tuple(region.nbytes for region in regions)
        address = UcxAddress.of(self._worker.address(), self._token, self._sizes)
        self.address = msgspec.msgpack.encode(address)
        self._readers: dict[bytes, _Reader] = {}
        self._leaving: list[Request] = []
        self._stopping = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = Thread(target=self._run, name="ucx-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread, which gives everything back. Raises TransportError if it goes on."""
        self._stopping = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(_STOP_S)
        if self._thread.is_alive():
            raise TransportError(f"the ucx server did not stop within {_STOP_S} s")
        os.close(self._wake)

    def _run(self) -> None:
        with ExitStack() as stack:
            stack.callback(self._worker.close)
            stack.callback(self._readers.clear)
            frame = np.zeros(MAX_FRAME_BYTES, dtype=np.uint8)
            inbox = self._worker.receive(frame, None)
            while not self._stopping:
                self._worker.progress()
                if inbox.handle.completed:
                    self._take(inbox)
                    inbox = self._worker.receive(frame, None)
                    continue
                self._patrol()
                if self._worker.arm():
                    wait_readable((self._worker.event_fd, self._wake), _PATROL_S)

    def _take(self, inbox: Request) -> None:
        # A bad frame costs a line in the log, and nothing else.
        try:
            self._worker.is_done(inbox)
            request = decode_frame(inbox.buffer.data)
            if not hmac.compare_digest(request.token, self._token):
                raise TransportError("the token is not that of this incarnation")
            self._answer(request)
        except TransportError as error:
            structlog.get_logger(__name__).warning("ucx_request_refused", reason=str(error))

    def _answer(self, request: PartRequest) -> None:
        reader = self._reader(request.reader)
        try:
            check_pieces(request.spans, request.region, sizes=self._sizes, most=MAX_PART_BYTES)
            self._reap(reader)
            if len(reader.sends) >= MAX_PARTS_IN_FLIGHT:
                raise TransportError(f"over {MAX_PARTS_IN_FLIGHT} parts in flight")
        except TransportError as error:
            text = str(error).encode()[:REFUSAL_BYTES].ljust(REFUSAL_BYTES, b"\0")
            refusal = np.frombuffer(text, dtype=np.uint8)
            self._leaving.append(self._worker.send(reader.endpoint, refusal, request.refusal_tag))
            raise
        memory = self._regions[request.region]
        spans = [memory[offset : offset + length] for offset, length in request.spans]
        messages = [_joined(memory, request.spans)] if request.joined else spans
        send = partial(self._worker.send, reader.endpoint)
        reader.sends.append(list(map(send, messages, count(request.tag))))

    def _reader(self, address: bytes) -> _Reader:
        known = self._readers.get(address)
        if known is not None and known.endpoint.alive:
            return known
        self._patrol()
        if len(self._readers) >= MAX_READERS:
            raise TransportError(f"over {MAX_READERS} readers")
        self._readers[address] = _Reader(self._worker.connect(address))
        return self._readers[address]

    def _patrol(self) -> None:
        """Forget what has been sent, and readers that have gone."""
        self._leaving = [send for send in self._leaving if not send.handle.completed]
        for address, reader in tuple(self._readers.items()):
            self._reap(reader)
            if not reader.endpoint.alive:
                del self._readers[address]
                self._leaving += chain.from_iterable(reader.sends)
                self._worker.disconnect(reader.endpoint)

    @staticmethod
    def _reap(reader: _Reader) -> None:
        # A send that failed needs no word: its reader has gone, or will ask again.
        reader.sends = [
            part for part in reader.sends if not all(send.handle.completed for send in part)
        ]


def _joined(memory: Bytes, spans: Sequence[tuple[int, int]]) -> Bytes:
    """A copy of all spans in one message."""
    part = np.empty(sum(length for _, length in spans), dtype=np.uint8)
    source, target = memory.ctypes.data, part.ctypes.data
    for offset, length in spans:
        ctypes.memmove(target, source + offset, length)
        target += length
    return part
