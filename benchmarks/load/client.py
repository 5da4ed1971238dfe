"""Sends requests to one OpenAI-compatible base URL and notes when each token comes.

aiohttp and not the openai client: that one builds validated objects, which takes many times as long
per event as decoding it, and what the client takes it takes from servers that share its cores.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter
from types import MappingProxyType
from typing import Any, Self

import aiohttp
import msgspec

from benchmarks.load.reply import Reply
from benchmarks.load.request import Request

TIMEOUT_S = 300.0
CHECK_TIMEOUT_S = 30.0
MAX_EVENT_BYTES = 1 << 20
MAX_ERROR_CHARS = 500
# Below the 5 s after which uvicorn closes idle connections: a request must not meet a closing one.
KEEPALIVE_S = 2.0
DATA, DONE = b"data:", b"[DONE]"
# What an event of a chat may bring besides `content`.
SAID = ("content", "reasoning", "reasoning_content", "tool_calls")


class TargetError(Exception):
    """A target that cannot be measured; the text says why, and what to do."""


@dataclass(slots=True)
class _Stream:
    """An answer as it comes."""

    due: float
    sent: float
    chunks: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""
    usage: dict[str, Any] = field(default_factory=dict)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False

    def add(self, event: dict[str, Any], now: float) -> None:
        """Takes one event in; raises ValueError for one that reports an error."""
        if error := event.get("error"):
            raise ValueError(_message(error))
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            self._add_choice(choice, now)

    def reply(self, error: str) -> Reply:
        """All of it, now that it has ended."""
        return Reply(
            due=self.due,
            sent=self.sent,
            ended=perf_counter(),
            chunks=tuple(self.chunks),
            text="".join(self.text),
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            usage=self.usage,
            logprobs=tuple(self.logprobs),
            error=error or self._missing(),
        )

    def _add_choice(self, choice: dict[str, Any], now: float) -> None:
        is_chat, ids = "delta" in choice, choice.get("token_ids")
        delta = choice["delta"] if is_chat else {"content": choice.get("text")}
        said = any(delta.get(key) for key in SAID)
        finish_reason = choice.get("finish_reason")
        # A chat's first event has a role and no token. A completion's events have tokens even where
        # their text is empty: half a character, or a special one.
        if ids or said or not is_chat or (finish_reason and not self.chunks):
            self.chunks.append(now)
        self.text.append(delta.get("content") or "")
        self.token_ids.extend(ids or ())
        self.finish_reason = finish_reason or self.finish_reason
        if logprobs := choice.get("logprobs"):
            self.logprobs.append(logprobs)

    def _missing(self) -> str:
        if not (self.finish_reason and self.done):
            return "the stream ended before the answer did"
        if not self.output_tokens:
            return "the stream has no usage"
        return "" if self.chunks else "the answer has no token"

    @property
    def output_tokens(self) -> int:
        return int(self.usage.get("completion_tokens") or 0)


class Client:
    """Talks to one target; use it with `async with`."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str = "none",
        headers: Mapping[str, str] = MappingProxyType({}),
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`url` with or without `/v1`; an empty `model` is the first that `check` finds."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self.model = model
        self._timeout_s = timeout_s
        self._headers = {"Authorization": f"Bearer {api_key}", **headers}

    async def __aenter__(self) -> Self:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        self._http = aiohttp.ClientSession(
            headers=self._headers,
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=MAX_EVENT_BYTES,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def check(self, like: Request) -> None:
        """Raises TargetError unless the target serves the model and streams usage.

        Asks for two tokens, in the form of `like` but with another prompt: no cache may learn it.
        """
        await self._check_model()
        reply = await self.send(_probe(like))
        if reply.error == "the stream has no usage":
            raise TargetError(
                f"{self.url} streams no usage: its server must answer "
                '"stream_options": {"include_usage": true}'
            )
        if reply.error:
            raise TargetError(f"{self.url} fails a request of two tokens: {reply.error}")

    async def served_models(self) -> list[str]:
        """The names that the target serves; raises TargetError."""
        url = f"{self.url}/v1/models"
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_S), self._http.get(url) as response:
                if response.status != HTTPStatus.OK:
                    raise TargetError(f"{url} answers {response.status}: is this the base URL?")
                return [str(model["id"]) for model in (await response.json())["data"]]
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise TargetError(f"{url} does not answer ({error}): is the server up?") from error
        except (ValueError, KeyError, TypeError) as error:
            raise TargetError(f"{url} is no list of models: is this the base URL?") from error

    async def send(self, request: Request, due: float | None = None) -> Reply:
        """The answer to `request`; whatever goes wrong stands in `Reply.error`."""
        sent = perf_counter()
        stream, error = _Stream(sent if due is None else due, sent), ""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._stream(request, stream)
        except TimeoutError:
            error = f"not done after {self._timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as problem:
            error = f"{type(problem).__name__}: {problem}"[:MAX_ERROR_CHARS]
        return stream.reply(error)

    async def _check_model(self) -> None:
        names = await self.served_models()
        self.model = self.model or next(iter(names), "")
        if self.model not in names:
            raise TargetError(
                f"{self.url} does not serve {self.model!r}: --model may be {', '.join(names)}"
            )

    async def _stream(self, request: Request, stream: _Stream) -> None:
        path, body = _path_and_body(request, self.model)
        async with self._http.post(f"{self.url}{path}", json=body) as response:
            if response.status != HTTPStatus.OK:
                raise ValueError(f"HTTP {response.status}: {await response.text()}")
            async for line in response.content:
                if not line.startswith(DATA):
                    continue
                now, data = perf_counter(), line[len(DATA) :].strip()
                if data == DONE:
                    stream.done = True
                    return
                stream.add(msgspec.json.decode(data), now)


def _path_and_body(request: Request, model: str) -> tuple[str, dict[str, Any]]:
    what = {"messages": request.messages} if request.messages else {"prompt": request.prompt}
    path = "/v1/chat/completions" if request.messages else "/v1/completions"
    body = {
        "model": model,
        **what,
        "max_tokens": request.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        **request.sampling,
    }
    return path, body


def _probe(like: Request) -> Request:
    if like.messages:
        hello = ({"role": "user", "content": "Hello"},)
        return Request(messages=hello, max_tokens=2, sampling=like.sampling)
    prompt = "Hello" if isinstance(like.prompt, str) else like.prompt[:1]
    return Request(prompt=prompt, max_tokens=2, sampling=like.sampling)


def _message(error: Any) -> str:
    return str(error.get("message", error) if isinstance(error, dict) else error)
