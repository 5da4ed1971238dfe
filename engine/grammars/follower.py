"""The process of one grammar: compiles it and follows the outputs that it binds.

Whatever a grammar makes of its time and memory, only this process pays: the system ends it where it
takes too much. llguidance's own limits are wide, since they stop honest grammars too (a list of a
thousand choices), and say nothing of seconds and bytes.
"""

import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import llguidance
from msgspec import structs

from engine.grammars.wire import MAX_PACKET_BYTES, Kind, Message, read_packet

MEMORY_BYTES: Final = 512 * 2**20
OUTPUT_S: Final = 10.0
TOKEN_S: Final = 1.0
SLOW_TOKEN_S: Final = 0.02
_NICE: Final = 5
# Columns of /proc/self/statm.
_MAPPED: Final = 0
_HELD: Final = 1

_LIMITS: Final = llguidance.LLParserLimits(
    max_items_in_row=200_000,
    initial_lexer_fuel=50_000_000,
    step_lexer_fuel=10_000_000,
    step_max_items=1_000_000,
    max_lexer_states=2_000_000,
    max_grammar_size=5_000_000,
    verbose_errors=False,
)
_TOO_COMPLEX: Final = "it is too complex: make it simpler"


class Refused(Exception):
    """The grammar, or one sequence of it, cannot go on."""


class Follower:
    """Answers the messages that come over `node`, until the node closes it."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, node: socket.socket) -> None:
        self._tokenizer = tokenizer
        self._node = node
        self._text = ""
        self._grammar: llguidance.LLMatcher | None = None
        self._sequences: dict[int, llguidance.LLMatcher] = {}
        self._gives_way = False
        self._bytes_at_start = _memory(_HELD)
        most = _memory(_MAPPED) + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))

    def serve(self) -> None:
        """Returns when the node is gone or wants no more."""
        while packet := self._node.recv(MAX_PACKET_BYTES):
            message = read_packet(packet)
            try:
                self._handle(message)
            except Refused as error:
                self._sequences.pop(message.sequence, None)
                self._tell(Message(Kind.REFUSED, message.sequence, str(error)))

    def _handle(self, message: Message) -> None:
        sequence = message.sequence
        matcher = self._sequences.get(sequence)  # None: it was refused before
        match message.kind:
            case Kind.GRAMMAR:
                self._text += message.text
            case Kind.COMPILE:
                self._compile(message)
            case Kind.OPEN if self._grammar is not None:
                self._sequences[sequence] = self._grammar.deep_copy()
            case Kind.TOKENS if matcher is not None:
                with _within(OUTPUT_S):
                    is_allowed = matcher.consume_tokens(message.token_ids)
                if not is_allowed:
                    del self._sequences[sequence]
                    self._tell(Message(Kind.NOT_ALLOWED, sequence))
            case Kind.NEXT if matcher is not None:
                self._tell(
                    Message(Kind.MASK, sequence, mask=self._next(matcher, message.token_ids))
                )
            case Kind.CLOSE:
                self._sequences.pop(sequence, None)

    def _compile(self, message: Message) -> None:
        if message.gives_way:
            self._give_way()
        with _within(message.limit_s):
            grammar = llguidance.LLMatcher(self._tokenizer, self._text, log_level=0, limits=_LIMITS)
            if grammar.is_error():
                raise Refused(grammar.get_error().strip())
            # The first token costs the most, and tells a grammar that nothing can follow.
            ahead = grammar.deep_copy()
            bits = int.from_bytes(_mask(ahead), "little")
            ahead.consume_token((bits & -bits).bit_length() - 1)
            if ahead.is_error():
                raise Refused(_TOO_COMPLEX)
        self._grammar = grammar
        self._tell(Message(Kind.READY))

    def _next(self, matcher: llguidance.LLMatcher, token_ids: list[int]) -> bytes:
        """The mask after one more token, or none."""
        started = time.process_time()
        with _within(TOKEN_S):
            # Once the grammar has ended only the end of text is left.
            if token_ids and not matcher.is_stopped():
                matcher.consume_tokens(token_ids)
            mask = _mask(matcher)
        if time.process_time() - started > SLOW_TOKEN_S:
            self._give_way()
        return mask

    def _give_way(self) -> None:
        """The model's threads go first from now on."""
        if not self._gives_way:
            self._gives_way = True
            os.nice(_NICE)

    def _tell(self, message: Message) -> None:
        num_bytes = max(0, _memory(_HELD) - self._bytes_at_start)
        self._node.sendall(structs.replace(message, num_bytes=num_bytes).packed())


def _mask(matcher: llguidance.LLMatcher) -> bytes:
    """A bit per token of the vocabulary, least significant first: set if it may come next.

    Where the grammar ends, that is the end of text. Raises Refused where nothing may come.
    """
    mask = matcher.compute_bitmask()
    if matcher.is_error():
        raise Refused(_TOO_COMPLEX)
    if not any(mask):
        raise Refused("no token may follow here")
    return mask


@contextmanager
def _within(seconds: float) -> Iterator[None]:
    """The system ends this process once the block has had a core for so long.

    Seconds of a core and not of the clock: what others do here must not end an honest grammar.
    """
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


def _memory(column: int) -> int:
    """Bytes that this process maps or holds, those that it shares with its parent included."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[column]) * resource.getpagesize()
