"""Workload files: the format of each is known by its content. `benchmarks/README.md` lists them.

Mooncake's JSON lines and Azure's CSV say how long prompts are; ShareGPT's conversations and our own
requests (`benchmarks/load/request.py`) have texts. Every error names file, line and what was
expected there.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from benchmarks.load.request import FORMATS, Request
from benchmarks.workloads.traces import TRACE_BLOCK, BlockIds, Record, TraceError

MOONCAKE = "Mooncake's trace"
AZURE = "Azure's trace"
SHAREGPT = "ShareGPT's conversations"
REQUESTS = "requests"
EXPECTED = {
    MOONCAKE: '{"timestamp", "input_length", "output_length", "hash_ids"}',
    AZURE: "TIMESTAMP,ContextTokens,GeneratedTokens",
    SHAREGPT: '[{"id", "conversations": [{"from", "value"}, ...]}, ...]',
}
AZURE_HEADER = EXPECTED[AZURE].lower().encode()
BOM = b"\xef\xbb\xbf"
SHOWN_BYTES = 40
ROLES = {
    "system": "system",
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "chatgpt", "assistant", "bing", "bard"), "assistant"),
}
CHARACTERS_PER_TOKEN = 4


class _Said(msgspec.Struct):
    speaker: str = msgspec.field(name="from")
    value: str


class _Conversation(msgspec.Struct):
    conversations: list[_Said]


def format_of(file: Path) -> str:
    """By the first line that is not empty. Raises OSError, and TraceError for any other file."""
    with file.open("rb") as lines:
        first = next(filter(bytes.strip, lines), b"").strip().removeprefix(BOM)
    if not first:
        raise TraceError(f"{file} holds no request; {FORMATS}")
    if first.startswith(b"["):
        return SHAREGPT
    if first.startswith(b"{"):
        return MOONCAKE if b'"hash_ids"' in first else REQUESTS
    if first.lower().startswith(b"timestamp,"):
        return AZURE
    got = first[:SHOWN_BYTES].decode(errors="replace")
    expected = " or ".join(f"{EXPECTED[name]} of {name}" for name in EXPECTED)
    raise TraceError(f"{file}, line 1: expected {expected}, or JSON lines; got {got!r}; {FORMATS}")


def read_trace(file: Path) -> list[Record]:
    """The records of a file that has lengths. Raises OSError, and TraceError with the line."""
    kind = format_of(file)
    if kind not in (MOONCAKE, AZURE):
        raise TraceError(
            f"{file} has {kind}, which only `benchmarks.serving --workload` takes; expected "
            f"{EXPECTED[MOONCAKE]} or {EXPECTED[AZURE]}; {FORMATS}"
        )
    parse = _Azure() if kind == AZURE else _mooncake
    records: list[Record] = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip() or (kind == AZURE and _is_header(line, number)):
                continue
            try:
                record = parse(line)
                _check(record, records[-1].timestamp if records else 0.0)
            except (ValueError, TypeError) as error:
                raise _error(file, number, error, kind=kind) from error
            records.append(record)
    if not records:
        raise TraceError(f"{file} holds no request; {FORMATS}")
    return records


def read_conversations(file: Path, count: Callable[[str], int] | None = None) -> list[Request]:
    """A session per conversation, and a request per answer, of as many tokens as that one had.

    `count`: tokens of a text; without it four characters are one. Raises OSError and TraceError.
    """
    data = file.read_bytes()
    try:
        entries = msgspec.json.decode(data, type=list[msgspec.Raw])
    except msgspec.DecodeError as error:
        byte = re.search(r"\(byte (\d+)\)", str(error))
        line = _line(data, int(byte[1]) if byte else len(data))
        raise _error(file, line, error, kind=SHAREGPT) from error
    made: list[Request] = []
    for number, entry in enumerate(entries):
        try:
            conversation = msgspec.json.decode(entry, type=_Conversation)
            made += _answers(conversation, str(number), count or _estimated)
        except ValueError as error:
            line = _line(data, _start(data, entries[: number + 1]))
            raise _error(file, line, error, kind=SHAREGPT) from error
    if not made:
        raise TraceError(f"{file} holds no conversation with an answer; {FORMATS}")
    return made


def _error(file: Path, line: int, error: Exception, *, kind: str) -> TraceError:
    return TraceError(f"{file}, line {line}: {error}; expected {EXPECTED[kind]}; {FORMATS}")


def _mooncake(line: bytes) -> Record:
    return msgspec.json.decode(line, type=Record)


class _Azure:
    """Parses one row after another. No prompt shares anything with another one."""

    def __init__(self) -> None:
        self._begun: datetime | None = None
        self._ids = BlockIds()
        self._numbers = itertools.count()

    def __call__(self, line: bytes) -> Record:
        at, context, generated = line.decode().strip().split(",")
        time = datetime.fromisoformat(at)
        self._begun = self._begun or time
        segment = (next(self._numbers), int(context))
        return Record(
            timestamp=1000 * (time - self._begun).total_seconds(),
            input_length=int(context),
            # An answer of no token cannot be asked for.
            output_length=max(1, int(generated)),
            hash_ids=self._ids.of((segment,)),
            segments=(segment,),
        )


def _is_header(line: bytes, number: int) -> bool:
    """Whether it names the columns, of which `format_of` has seen the first."""
    return number == 1 and line.strip().removeprefix(BOM).lower() == AZURE_HEADER


def _check(record: Record, earliest: float) -> None:
    blocks = -(-record.input_length // TRACE_BLOCK)
    if record.input_length < 1 or len(record.hash_ids) != blocks:
        raise TraceError(
            f"{len(record.hash_ids)} hash_ids for input_length {record.input_length}, "
            f"which has {blocks} blocks of {TRACE_BLOCK} tokens"
        )
    if record.timestamp < earliest:
        raise TraceError(f"timestamp {record.timestamp} after {earliest}; sort the file")
    if record.segments and sum(size for _, size in record.segments) != record.input_length:
        raise TraceError(f"segments do not add up to input_length {record.input_length}")


def _answers(
    conversation: _Conversation, session: str, count: Callable[[str], int]
) -> Iterator[Request]:
    """A request per answer that a user's message stands before; the first begins the session."""
    said: list[dict[str, str]] = []
    is_first, is_asked = True, False
    for one in conversation.conversations:
        speaker = ROLES.get(one.speaker)
        if speaker is None:
            raise TraceError(f"unknown `from` {one.speaker!r}, not one of {', '.join(ROLES)}")
        if speaker != "assistant":
            said.append({"role": speaker, "content": one.value})
            is_asked |= speaker == "user"
        elif is_asked:
            yield Request(
                messages=tuple(said),
                max_tokens=max(1, count(one.value)),
                session=session,
                continues=not is_first,
            )
            said, is_first, is_asked = [], False, False


def _estimated(text: str) -> int:
    return math.ceil(len(text) / CHARACTERS_PER_TOKEN)


def _start(data: bytes, entries: Sequence[msgspec.Raw]) -> int:
    """Where the last of `entries` begins; they follow each other in `data`."""
    place = end = 0
    for entry in map(bytes, entries):
        place = data.index(entry, end)
        end = place + len(entry)
    return place


def _line(data: bytes, place: int) -> int:
    return 1 + data.count(b"\n", 0, place)
