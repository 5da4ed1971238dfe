"""One request of a load, and loads as files of JSON lines: one request per line.

    {"arrival_s": 1.5, "session": "a", "prompt": "Once", "max_tokens": 64}
    {"session": "a", "think_s": 2.0, "continues": true, "prompt": " upon", "max_tokens": 64}

Knows no server and no clock.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta

from benchmarks.load.reply import Reply

Prompt = str | tuple[int, ...]
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
# A model without a tokenizer has no text to stream, only these.
WITH_IDS: dict[str, Any] = {**GREEDY, "return_token_ids": True}
FORMATS = "benchmarks/README.md describes the formats"
_Seconds = Annotated[float, Meta(ge=0.0, le=1e9)]


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request and its time: a text or token ids to complete, or the messages of a chat.

    Requests of one `session` follow each other in the order of the load: each is sent `think_s`
    seconds after the answer to the one before, and not before its own `arrival_s` (seconds from
    the start). Without a session a request stands alone. One that `continues` adds its prompt, or
    its messages, to those of the one before and its answer. `sampling` goes into the body as it is.
    """

    prompt: Prompt = ""
    messages: tuple[dict[str, Any], ...] = ()
    max_tokens: Annotated[int, Meta(ge=1)]
    sampling: dict[str, Any] = msgspec.field(default_factory=GREEDY.copy)
    session: str = ""
    arrival_s: _Seconds = 0.0
    think_s: _Seconds = 0.0
    continues: bool = False

    def __post_init__(self) -> None:
        """Raise ValueError unless there is a prompt or messages, and not both."""
        if bool(self.prompt) == bool(self.messages):
            raise ValueError("give a prompt or messages, and not both")
        if self.continues and not self.session:
            raise ValueError("a request that continues another one needs a session")

    def after(self, before: Self, answer: Reply) -> Self:
        """This request as it is sent when `before` was answered so."""
        if not self.continues:
            return self
        if self.messages:
            said = {"role": "assistant", "content": answer.text}
            return msgspec.structs.replace(self, messages=(*before.messages, said, *self.messages))
        if isinstance(self.prompt, str) and isinstance(before.prompt, str):
            return msgspec.structs.replace(self, prompt=before.prompt + answer.text + self.prompt)
        if isinstance(self.prompt, tuple) and isinstance(before.prompt, tuple):
            tokens = (*before.prompt, *answer.token_ids, *self.prompt)
            return msgspec.structs.replace(self, prompt=tokens)
        raise ValueError(f"session {self.session!r} mixes texts, token ids and messages")


def sessions_of(requests: Iterable[Request]) -> list[list[int]]:
    """The places of each session's requests; sessions in the order of their first ones."""
    sessions: dict[str | int, list[int]] = {}
    for place, request in enumerate(requests):
        sessions.setdefault(request.session or place, []).append(place)
    return list(sessions.values())


def salted(requests: Iterable[Request], salt: str) -> list[Request]:
    """The same requests, whose prefixes no earlier run has cached; own salts still tell apart."""
    made = []
    for request in requests:
        own = request.sampling.get("cache_salt")
        sampling = {**request.sampling, "cache_salt": f"{salt} {own}" if own else salt}
        made.append(msgspec.structs.replace(request, sampling=sampling))
    return made


def read_requests(file: Path) -> list[Request]:
    """The load of a file. Raises ValueError that names the line."""
    made = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            made.append(msgspec.json.decode(line, type=Request))
        except msgspec.DecodeError as error:
            expected = 'expected {"prompt" or "messages", "max_tokens", ...}'
            raise ValueError(f"{file}, line {number}: {error}; {expected}; {FORMATS}") from error
    if not made:
        raise ValueError(f"{file} holds no request; {FORMATS}")
    return made


def write_requests(file: Path, requests: Sequence[Request]) -> None:
    """The load as JSON lines; replaces the file as a whole."""
    partial = file.with_name(f".{file.name}.partial")
    partial.write_bytes(b"".join(msgspec.json.encode(request) + b"\n" for request in requests))
    partial.replace(file)
