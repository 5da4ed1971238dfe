"""A node's view of its grammar processes: started, spoken to, watched and ended."""

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

from engine.errors import GrammarError, InvalidRequestError, UnavailableError
from engine.grammars.fork_server import FORK, KILL, READY
from engine.grammars.matcher import MaskNews, Matcher
from engine.grammars.wire import MAX_PACKET_BYTES, Kind, Message, in_pieces, read_packet
from engine.types import TokenId

START_S: Final = 60.0
SEND_S: Final = 10.0
LEAST_BYTES: Final = 4 * 2**20
"""Memory of the smallest process."""


class GrammarProcess:
    """The process of one grammar, and the sequences that it follows; on the event loop.

    `on_news`: called when a sequence has ended, and with each answer, which may tell of more
    memory. `tenant` pays for it.
    """

    def __init__(self, node: socket.socket, tenant: str, kill: Callable[[], None]) -> None:
        self.tenant = tenant
        self.num_bytes = LEAST_BYTES
        self.is_ended = False
        self.on_news: Callable[[GrammarProcess], None] = lambda _: None
        self._node = node
        self._kill = kill
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._opening: dict[int, asyncio.Future[None]] = {}
        self._matchers: dict[int, Matcher] = {}
        self._sequence = 0
        asyncio.get_running_loop().add_reader(node, self._read)

    @property
    def num_sequences(self) -> int:
        return len(self._matchers)

    async def compile(self, grammar: str, *, limit_s: float, gives_way: bool) -> bool:
        """False where the process ended: the grammar takes more than the limits allow.

        Raises GrammarError for a grammar that llguidance refuses; then the process ends too.
        """
        try:
            for piece in in_pieces(grammar):
                await self._send_all(Message(Kind.GRAMMAR, text=piece))
            await self._send_all(Message(Kind.COMPILE, limit_s=limit_s, gives_way=gives_way))
            await self._ready
        except BaseException:
            self.end()
            raise
        return not self.is_ended

    async def open(self, output: Sequence[TokenId], news: MaskNews) -> Matcher:
        """A matcher of a sequence with `output` so far; `news` rings for its masks.

        Raises GrammarError where the grammar ends with it, and InvalidRequestError where it does
        not allow `output`.
        """
        if self.is_ended:
            raise _too_much()
        self._sequence += 1
        number = self._sequence
        matcher = Matcher(news, partial(self._ask, number), partial(self._forget, number))
        opening = asyncio.get_running_loop().create_future()
        self._matchers[number], self._opening[number] = matcher, opening
        try:
            await self._send_all(Message(Kind.OPEN, number))
            for piece in in_pieces(list(output)):
                await self._send_all(Message(Kind.TOKENS, number, token_ids=piece))
            await self._send_all(Message(Kind.NEXT, number))
            await opening
        except BaseException:
            self._forget(number)
            raise
        finally:
            self._opening.pop(number, None)
        return matcher

    def end(self) -> None:
        """Ends the process, whatever it is at; its sequences fail."""
        if not self.is_ended:
            self._kill()
            self._on_end()  # at once, and not when its socket closes: nobody is to count on it

    def _ask(self, number: int, token_id: TokenId) -> None:
        """From the engine's thread. A process that takes no more is full of slow sequences."""
        try:
            self._node.send(Message(Kind.NEXT, number, token_ids=[token_id]).packed())
        except OSError:
            if (matcher := self._matchers.get(number)) is not None:
                matcher.error = _too_much()

    async def _send_all(self, message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_S):
                await asyncio.get_running_loop().sock_sendall(self._node, message.packed())
        except OSError:  # it has ended, which the reader notices, or takes nothing
            self.end()

    def _forget(self, number: int) -> None:
        """The sequence has ended, here or in the process."""
        if self._matchers.pop(number, None) is not None and not self.is_ended:
            # A process whose socket is full is about to be ended by its limits.
            with suppress(OSError):
                self._node.send(Message(Kind.CLOSE, number).packed())
            self.on_news(self)

    def _read(self) -> None:
        try:
            packet = self._node.recv(MAX_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if packet:
            self._take(read_packet(packet))
        else:
            self._on_end()

    def _take(self, message: Message) -> None:
        self.num_bytes = LEAST_BYTES + message.num_bytes
        matcher = self._matchers.get(message.sequence)
        opening = self._opening.get(message.sequence)
        match message.kind:
            case Kind.READY:
                _settle(self._ready)
            case Kind.REFUSED if not message.sequence:
                refusal = GrammarError(f"the grammar cannot be compiled: {message.text}")
                _settle(self._ready, refusal)
            case Kind.MASK if matcher is not None:
                matcher.arrived(message.mask)
                _settle(opening)
            case Kind.REFUSED if matcher is not None:
                matcher.error = GrammarError(f"the grammar cannot be followed: {message.text}")
                _settle(opening, matcher.error)
            case Kind.NOT_ALLOWED:
                field = "output_token_ids"
                text = f"{field}: the request's grammar does not allow them"
                _settle(opening, InvalidRequestError(text, param=field))
        if matcher is not None:
            matcher.news.ring()
        self.on_news(self)

    def _on_end(self) -> None:
        if self.is_ended:
            return
        self.is_ended = True
        # Before it is closed: its number may be another's a moment later.
        asyncio.get_running_loop().remove_reader(self._node)
        self._node.close()
        _settle(self._ready)  # `compile` tells by `is_ended` what that means
        for opening in self._opening.values():
            _settle(opening, _too_much())
        for matcher in self._matchers.values():
            matcher.error = _too_much()
            matcher.news.ring()
        self.on_news(self)


class ForkServer:
    """The node's side of `engine.grammars.fork_server`; on the event loop."""

    def __init__(self, process: "subprocess.Popen[bytes]", control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._number = 0

    @classmethod
    async def start(
        cls, tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[TokenId]
    ) -> "ForkServer":
        """Raises UnavailableError; InvalidRequestError for a tokenizer that takes no grammar."""
        numbers = (vocab_size, *eos_token_ids)
        process, control = await asyncio.to_thread(_launch, tokenizer_json, numbers)
        server = cls(process, control)
        try:
            async with asyncio.timeout(START_S):
                told = await asyncio.get_running_loop().sock_recv(control, MAX_PACKET_BYTES)
        except BaseException:
            await server.close()
            raise
        if told == READY:
            return server
        await server.close()
        if told:
            raise InvalidRequestError(f"this model's tokens take no grammar: {told[1:].decode()}")
        raise UnavailableError("the process that compiles grammars did not start: try again")

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def fork(self, tenant: str) -> GrammarProcess:
        """A process that waits for its grammar."""
        self._number += 1
        # If no process is to be had, theirs closes, and the process counts as ended.
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        kill = partial(self._tell, KILL, self._number)
        process = GrammarProcess(ours, tenant, kill)
        with theirs:
            self._tell(FORK, self._number, theirs)
        return process

    async def close(self) -> None:
        """Ends the server and the processes that it has forked."""
        self._control.close()
        try:
            await asyncio.to_thread(self._process.wait, SEND_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            await asyncio.to_thread(self._process.wait)

    def _tell(self, what: bytes, number: int, *sockets: socket.socket) -> None:
        """A few bytes, which always fit unless the server is gone: then so are its children."""
        files = [it.fileno() for it in sockets]
        with suppress(OSError):
            socket.send_fds(self._control, [what + str(number).encode()], files)


def _launch(
    tokenizer_json: str, numbers: Sequence[int]
) -> "tuple[subprocess.Popen[bytes], socket.socket]":
    """The program with the tokenizer's text, and our end of its socket."""
    control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    control.setblocking(False)
    tokenizer = os.memfd_create("tokenizer.json", 0)
    with theirs, open(tokenizer, "w", encoding="utf-8") as file:
        file.write(tokenizer_json)
        file.flush()
        os.lseek(tokenizer, 0, os.SEEK_SET)
        files = (theirs.fileno(), tokenizer)
        process = subprocess.Popen(
            [sys.executable, "-m", "engine.grammars.fork_server", *map(str, (*files, *numbers))],
            pass_fds=files,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )
    return process, control


def _too_much() -> GrammarError:
    return GrammarError("the grammar took too much time or memory to be followed: make it simpler")


def _settle(
    waiting: "asyncio.Future[None] | None", error: InvalidRequestError | None = None
) -> None:
    if waiting is None or waiting.done():
        return
    if error is None:
        waiting.set_result(None)
    else:
        waiting.set_exception(error)
