"""Messages between a node and the process of one grammar, over a pair of packet sockets.

A packet arrives whole or not at all, so that two threads may send on one socket. Long texts and
outputs travel in pieces, since the system bounds a packet.
"""

from collections.abc import Iterator
from enum import IntEnum
from typing import Final, TypeVar

import msgspec

PIECE: Final = 16_384
"""Characters or tokens in one packet."""
MAX_PACKET_BYTES: Final = 2**20

_Whole = TypeVar("_Whole", str, list[int])


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


class Message(msgspec.Struct, frozen=True, array_like=True):
    """One packet. `sequence`: 0 for the grammar itself. `num_bytes`: what the process has taken.

    `text`: of a grammar, or why it is refused. `limit_s`: seconds of one core to compile it in.
    `gives_way`: to all that is more urgent on this machine.
    """

    kind: Kind
    sequence: int = 0
    text: str = ""
    token_ids: list[int] = []
    mask: bytes = b""
    num_bytes: int = 0
    limit_s: float = 0.0
    gives_way: bool = False

    def packed(self) -> bytes:
        """The packet's bytes."""
        return msgspec.msgpack.encode(self)


read_packet: Final = msgspec.msgpack.Decoder(Message).decode
"""The message in a packet."""


def in_pieces(whole: _Whole) -> Iterator[_Whole]:
    """A text or an output in parts that fit a packet."""
    for start in range(0, len(whole), PIECE):
        yield whole[start : start + PIECE]
