"""`python -m benchmarks.robustness.attacks.acts ACT URL KEY SECONDS`: one hostile client.

It prints how often it heard each status, and what was said with it. Its requests are bounded in
number and time, and it gives way to the servers, whose cores it shares.
"""

import asyncio
import gzip
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal
from urllib.parse import urlsplit

import msgspec

NICE: Final = 10
MAX_REQUESTS: Final = 5_000
COMPLETIONS: Final = "/v1/completions"
CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages/count_tokens"
SLOW_PIECE: Final = 256
ANSWER_S: Final = 60.0
LAST_ANSWERS_S: Final = 12.0

Body = Mapping[str, Any]
Manner = Literal["reads", "reads nothing", "reads little", "leaves"]


@dataclass(slots=True, frozen=True)
class Act:
    """`body`: of request number n. `clients` send at once, each its next one after an answer."""

    kind: str
    clients: int
    body: Callable[[int], Body]
    path: str = COMPLETIONS
    manner: Manner = "reads"
    packed: bool = False


class Heard(msgspec.Struct):
    """Answers by status, 0 where none came, and one message for each status."""

    statuses: dict[int, int]
    messages: dict[int, str]


def _ask(**fields: Any) -> Body:
    return {"model": "bench", "prompt": "Hello", "max_tokens": 64, **fields}


def _bound(schema: Any, **fields: Any) -> Body:
    return _ask(structured_outputs={"json": schema}, **fields)


def _intersections(number: int) -> Body:
    # A letter of its own makes every grammar a new one, which no memory of refusals helps with.
    letter = chr(ord("a") + number % 26)
    patterns = [f"^(.*{letter}.{{{n}}}b.*)$" for n in range(3, 27)]
    return _bound({"allOf": [{"type": "string", "pattern": it} for it in patterns]})


def _products(number: int) -> Body:
    divisors = (97, 89, 83, 79 + number)
    return _bound({"allOf": [{"type": "integer", "multipleOf": it} for it in divisors]})


def _keys(number: int) -> Body:
    keys = {f"k{number}_{n}": {"type": "string"} for n in range(4000)}
    return _bound({"type": "object", "properties": keys})


def _slow_masks(_: int) -> Body:
    rule = r"start: A" "\n" r"A: /[ab]*a[ab]{20}/ & /[ab]*b[ab]{21}/ & /[ab]*b[ab]{22}/"
    return _ask(structured_outputs={"grammar": rule}, n=8, max_tokens=200)


def _readings(_: int) -> Body:
    return _ask(structured_outputs={"grammar": 'start: e\ne: e e | "a" | e e e'}, max_tokens=200)


def _chat(count: int) -> Body:
    turns = itertools.cycle(("user", "assistant"))
    messages = [{"role": next(turns), "content": "a"} for _ in range(count | 1)]
    return {"model": "bench", "max_tokens": 1, "messages": messages}


def _deep(_: int) -> Body:
    nested: Any = {}
    for _level in range(800):
        nested = {"a": nested}
    return _ask(structured_outputs={"json": nested})


def _stops(number: int) -> Body:
    stop = ["a" * 200 + chr(ord("b") + n) for n in range(4)]
    bad = [f"{word}{number}" for word in map("ab{}".format, range(500))]
    return _ask(stop=stop, bad_words=bad, max_tokens=400, ignore_eos=True)


def _biases(_: int) -> Body:
    return _ask(
        logit_bias={str(n): 1.0 for n in range(300)},
        logprobs=5,
        max_tokens=400,
        repetition_penalty=1.1,
        ignore_eos=True,
    )


ACTS: Mapping[str, Act] = MappingProxyType(
    {
        "intersections": Act("grammars", 3, _intersections),
        "products": Act("grammars", 3, _products),
        "slow masks": Act("grammars", 2, _slow_masks),
        "many keys": Act("grammars", 4, _keys),
        "no end": Act(
            "grammars",
            6,
            lambda n: _ask(structured_outputs={"grammar": f'start: "a" start | "{n}" start'}),
        ),
        "many readings": Act("grammars", 8, _readings),
        "other schemas": Act(
            "grammars",
            14,
            lambda n: _bound({"type": "object", "properties": {f"p{n}": {"type": "string"}}}),
        ),
        "no attack, as busy": Act(
            "honest", 14, lambda n: _ask(prompt=f"{n}", max_tokens=400, ignore_eos=True)
        ),
        "nothing is read": Act(
            "places",
            4,
            lambda n: _ask(n=8, max_tokens=1900, logprobs=5, stream=True, ignore_eos=True),
            manner="reads nothing",
        ),
        "little is read": Act(
            "places",
            8,
            lambda n: _ask(n=2, max_tokens=1900, logprobs=5, stream=True, ignore_eos=True),
            manner="reads little",
        ),
        "convoy": Act("places", 8, lambda n: _ask(prompt=f"{n}", n=16, max_tokens=1)),
        "many prompts": Act(
            "places", 8, lambda n: _ask(prompt=[f"{n} {it}" for it in range(64)], max_tokens=4)
        ),
        "left at once": Act(
            "places",
            16,
            lambda n: _ask(prompt=f"{n}", max_tokens=1000, stream=True),
            manner="leaves",
        ),
        "large bodies": Act(
            "bodies",
            40,
            lambda n: _ask(
                prompt=f"{n} " + "word " * 300_000, truncate_prompt_tokens=16, max_tokens=1
            ),
        ),
        "one word": Act(
            "bodies",
            8,
            lambda n: _ask(prompt=f"{n}" + "a" * 60_000, truncate_prompt_tokens=16, max_tokens=1),
        ),
        "packed": Act(
            "bodies",
            8,
            lambda n: _ask(
                prompt=f"{n}" + " " * 8_000_000, truncate_prompt_tokens=16, max_tokens=1
            ),
            packed=True,
        ),
        "deep": Act("bodies", 8, _deep),
        "stop strings and bad words": Act("text", 14, _stops),
        "biases and penalties": Act("text", 14, _biases),
        "many messages": Act("text", 8, lambda _: _chat(16_000), path=CHAT),
        "tokens counted": Act(
            "text",
            8,
            lambda n: {
                "model": "bench",
                "messages": [{"role": "user", "content": f"{n}" + "é" * 900_000}],
            },
            path=MESSAGES,
        ),
    }
)


async def attack(act: Act, url: str, key: str, *, seconds: float) -> Heard:
    """Sends until `seconds` have passed, waits a while for answers, and leaves the others."""
    end = time.monotonic() + seconds
    numbers = itertools.takewhile(lambda _: time.monotonic() < end, range(MAX_REQUESTS))
    heard = Heard({}, {})
    clients = [_client(act, url, key, numbers=numbers, heard=heard) for _ in range(act.clients)]
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds + LAST_ANSWERS_S):
            await asyncio.gather(*clients)
    return heard


async def _client(act: Act, url: str, key: str, *, numbers: Iterator[int], heard: Heard) -> None:
    for number in numbers:
        status, said = 0, b""
        with suppress(OSError, asyncio.IncompleteReadError, ValueError):
            status, said = await _exchange(act, url, key, number=number)
        heard.statuses[status] = heard.statuses.get(status, 0) + 1
        heard.messages.setdefault(status, said.decode(errors="replace")[:300])
        if status in (0, 429, 503):
            await asyncio.sleep(0.1)


async def _exchange(act: Act, url: str, key: str, *, number: int) -> tuple[int, bytes]:
    """One request on a connection of its own; its status and the beginning of its reply."""
    place = urlsplit(url)
    body = msgspec.json.encode(act.body(number))
    extra = ""
    if act.packed:
        body, extra = gzip.compress(body), "Content-Encoding: gzip\r\n"
    head = (
        f"POST {act.path} HTTP/1.1\r\nHost: {place.netloc}\r\nAuthorization: Bearer {key}\r\n"
        f"Content-Type: application/json\r\n{extra}Content-Length: {len(body)}\r\n"
        "Connection: close\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(place.hostname, place.port, limit=SLOW_PIECE)
    try:
        writer.write(head.encode() + body)
        await writer.drain()
        async with asyncio.timeout(ANSWER_S):
            if act.manner == "reads nothing":
                writer.transport.pause_reading()  # type: ignore[attr-defined]
                await asyncio.sleep(ANSWER_S)
            status = int((await reader.readline()).split()[1])
            said = await _reply(reader, act.manner)
        return status, said
    except TimeoutError:
        return 0, b"no answer in time"
    finally:
        writer.close()


async def _reply(reader: asyncio.StreamReader, manner: Manner) -> bytes:
    if manner == "leaves":
        return b""
    kept = b""
    while piece := await reader.read(SLOW_PIECE if manner == "reads little" else 65_536):
        kept = kept or piece.partition(b"\r\n\r\n")[2]
        if manner == "reads little":
            await asyncio.sleep(1.0)
    return kept


def main() -> None:
    """Prints what was heard as JSON."""
    name, url, key, seconds = sys.argv[1:]
    os.nice(NICE)
    heard = asyncio.run(attack(ACTS[name], url, key, seconds=float(seconds)))
    sys.stdout.buffer.write(msgspec.json.encode(heard))


if __name__ == "__main__":
    main()
