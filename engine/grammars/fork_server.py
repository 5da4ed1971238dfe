"""The program that knows a tokenizer and forks a process per grammar: `python -m` starts it.

A tokenizer of 150,000 tokens takes a second to build; a fork has it at once and shares its memory.
It runs one thread, since only such a process may fork, and ends with the node whose socket it has.
"""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from contextlib import suppress
from typing import Any, Final, NoReturn

import llguidance

from engine.grammars.follower import Follower

STACK_BYTES: Final = 256 * 2**20
"""llguidance recurses once per rule or reference; the longest grammars that are taken need less.
Of a stack only what is touched takes memory."""
FORK: Final = b"f"
KILL: Final = b"k"
READY: Final = b"r"
UNFIT: Final = b"u"
_REAP_MS: Final = 1000
_PR_SET_PDEATHSIG: Final = 1


def main() -> None:
    """`argv`: descriptors of the node's socket and of tokenizer.json, logits, end-of-text ids."""
    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    wanted = STACK_BYTES if hard == resource.RLIM_INFINITY else min(STACK_BYTES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        # The system lays out memory for the stack when a program starts: so it starts again.
        resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
        os.execv(sys.executable, sys.orig_argv)
    # Those of a terminal or a supervisor are for the node, which ends us by its socket.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    node, tokenizer_file, vocab_size, *eos_token_ids = map(int, sys.argv[1:])
    with socket.socket(fileno=node) as control, open(tokenizer_file, encoding="utf-8") as text:
        try:
            tokenizer = _tokenizer(text.read(), vocab_size, eos_token_ids)
        except ValueError as error:
            control.send(UNFIT + str(error).encode()[:1000])
            return
        gc.collect()
        gc.freeze()  # a collection in a child would copy what it shares
        control.send(READY)
        _Children(tokenizer, control).serve()


class _Children:
    """Forks and ends processes as the node says; all of them end with this one."""

    def __init__(self, tokenizer: llguidance.LLTokenizer, control: socket.socket) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._pids: dict[int, int] = {}

    def serve(self) -> None:
        """Returns when the node is gone."""
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        while True:
            is_news = waiting.poll(_REAP_MS)
            # Forgotten once they have ended: only then may the system give their ids to others.
            for number, pid in list(self._pids.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del self._pids[number]
            if not is_news:
                continue
            packet, files, _, _ = socket.recv_fds(self._control, 64, 1)
            if not packet:
                return
            number = int(packet[1:])
            if packet[:1] == FORK:
                with socket.socket(fileno=files[0]) as theirs:
                    self._fork(number, theirs)
            elif number in self._pids:
                os.kill(self._pids[number], signal.SIGKILL)

    def _fork(self, number: int, node: socket.socket) -> None:
        with suppress(OSError):  # no process is to be had: the node sees its socket close
            if pid := os.fork():
                self._pids[number] = pid
            else:
                self._follow(node)

    def _follow(self, node: socket.socket) -> NoReturn:
        """The forked process, to its end."""
        status = 1
        # Broad: whatever happens, this copy of the parent must not go on as if it were the parent.
        try:
            self._control.close()
            parent = os.getppid()
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            # What the system prints of a process that it ends is no line of the node's log.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
            if os.getppid() == parent:
                Follower(self._tokenizer, node).serve()
            status = 0
        finally:
            os._exit(status)


def _tokenizer(text: str, vocab_size: int, eos_token_ids: list[int]) -> llguidance.LLTokenizer:
    """Without added tokens that no logit stands for, which llguidance refuses."""
    fields: dict[str, Any] = json.loads(text)
    tokens = fields.get("added_tokens") or []
    fields["added_tokens"] = [token for token in tokens if token["id"] < vocab_size]
    text = text if len(fields["added_tokens"]) == len(tokens) else json.dumps(fields)
    return llguidance.LLTokenizer(text, vocab_size, eos_token_ids)


if __name__ == "__main__":
    main()
