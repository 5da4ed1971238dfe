"""Messages between a node and the process of one grammar, over a pair of packet sockets.

A packet arrives whole or not at all, so that two threads may send on one socket. Long texts and
outputs travel in pieces, since the system bounds a packet.
"""

import struct
from array import array
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import Final, NamedTuple

PIECE_BYTES: Final = 65_536
MAX_PACKET_BYTES: Final = 2**20
_HEADER: Final = struct.Struct("<BIQ")
_COMPILE: Final = struct.Struct("<d?")


class Kind(IntEnum):
    """The messages; the first six go to the process, the others come from it."""

    GRAMMAR = 1  # a piece of the grammar's text
    COMPILE = 2  # all of it has come
    OPEN = 3  # a sequence begins
    TOKENS = 4  # a part of the output that it has already
    NEXT = 5  # its next token, or none: what may follow?
    CLOSE = 6  # a sequence has ended
    READY = 7  # the grammar is compiled
    MASK = 8  # a bit per token that may follow
    REFUSED = 9  # why the grammar, or this sequence, cannot go on
    NOT_ALLOWED = 10  # the sequence has tokens that the grammar does not allow


class Message(NamedTuple):
    """One packet. `sequence`: 0 for the grammar itself. `num_bytes`: what the process has taken."""

    kind: Kind
    sequence: int = 0
    payload: bytes = b""
    num_bytes: int = 0

    def packed(self) -> bytes:
        """The packet's bytes."""
        return _HEADER.pack(self.kind, self.sequence, self.num_bytes) + self.payload

    @classmethod
    def of(cls, packet: bytes) -> "Message":
        """The message in a packet."""
        kind, sequence, num_bytes = _HEADER.unpack_from(packet)
        return cls(Kind(kind), sequence, packet[_HEADER.size :], num_bytes)


def compile_message(limit_s: float, *, gives_way: bool) -> Message:
    """`limit_s`: seconds of one core. `gives_way`: to all that is more urgent on this machine."""
    return Message(Kind.COMPILE, payload=_COMPILE.pack(limit_s, gives_way))


def compile_limits(payload: bytes) -> tuple[float, bool]:
    """The limits that `compile_message` was given."""
    limit_s, gives_way = _COMPILE.unpack(payload)
    return limit_s, gives_way


def text_messages(text: str) -> Iterator[Message]:
    """A grammar's text in pieces."""
    data = text.encode()
    for start in range(0, len(data), PIECE_BYTES):
        yield Message(Kind.GRAMMAR, payload=data[start : start + PIECE_BYTES])


def token_messages(sequence: int, token_ids: Sequence[int]) -> Iterator[Message]:
    """An output in pieces."""
    data = array("I", token_ids).tobytes()
    for start in range(0, len(data), PIECE_BYTES):
        yield Message(Kind.TOKENS, sequence, data[start : start + PIECE_BYTES])


def next_message(sequence: int, token_ids: Sequence[int]) -> Message:
    """One token or none, and the question what may follow."""
    return Message(Kind.NEXT, sequence, array("I", token_ids).tobytes())


def tokens_of(payload: bytes) -> list[int]:
    """The tokens of a message."""
    return array("I", payload).tolist()
