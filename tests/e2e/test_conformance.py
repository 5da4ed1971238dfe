"""One table of requests, each to one node and to the proxy before P and D: the same reply.

Ids, times and what a hand-over or a cache did may differ. A stream adds up to the whole reply.
"""

import asyncio
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import aiohttp
import openai
import pytest

from tests.e2e.test_bad_requests import MALFORMED, WRONG_REQUESTS
from tests.support.api.node_double import client_of
from tests.support.nodes.asking import CHAT, COMPLETIONS, TIMEOUT, question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import API_KEY, ServedCluster, ServerProcess
from tests.tiers import everyday

IDS = list(prompt_of(70, salt=9))
TEXT = "the quick brown fox jumps"
TURNS = [
    {"role": "system", "content": "hello"},
    {"role": "user", "content": [{"type": "text", "text": "stop here now"}]},
]
SEEDED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.95, "top_k": 60}
PENALTIES = {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.1}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "trip", "parameters": SCHEMA}}]
PULLS = "vllm:nixl_bytes_transferred_count"
USAGE = {"stream_options": {"include_usage": True}}
ENDS = {"ignore_eos": False, "max_tokens": 60}
LIVES = ("id", "created", "kv_transfer", "prompt_tokens_details", "root", "nodes")
"""Keys that tell of one request and how it was served; a node has no `nodes`, a proxy no `root`."""


def text(**changes: Any) -> tuple[str, dict[str, Any]]:
    """A request for a completion of TEXT."""
    return COMPLETIONS, question(TEXT, max_tokens=20, **changes)


def chat(**changes: Any) -> tuple[str, dict[str, Any]]:
    """A request for the next turn."""
    body = question(None, **{"max_tokens": 20, "messages": TURNS, **changes})
    del body["prompt"]
    return CHAT, body


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "token ids": (COMPLETIONS, question(IDS, logprobs=3, max_tokens=40)),
    "text": text(),
    "seeded": text(**SEEDED, logprobs=2),
    "penalties": text(**SEEDED, **PENALTIES, logprobs=0),
    "min_p": text(temperature=0.7, seed=3, min_p=0.05),
    "one token": (COMPLETIONS, question(IDS, max_tokens=1, logprobs=1)),
    "default length": (COMPLETIONS, {"model": "tiny", "prompt": TEXT, "temperature": 0}),
    "no length": (COMPLETIONS, question(IDS * 5, max_tokens=None)),
    "until the end": (COMPLETIONS, question(TEXT, **ENDS, **SEEDED)),
    "n": text(**SEEDED, n=3),
    "best_of": text(**SEEDED, n=2, best_of=2),
    "prompts": (COMPLETIONS, question([TEXT, "hello", TEXT])),
    "prompts of ids, n": (COMPLETIONS, question([IDS, IDS[:30]], n=2, **SEEDED)),
    "echo": text(echo=True),
    "echo, n": text(echo=True, n=2, **SEEDED),
    "echo, logprobs": text(echo=True, logprobs=2),
    "echo alone": (COMPLETIONS, question(IDS, echo=True, logprobs=1, max_tokens=0)),
    "prompt_logprobs": (COMPLETIONS, question(IDS, prompt_logprobs=2)),
    "logit_bias": text(logit_bias={"7": 3.5, "70": -100}, logprobs=1),
    "allowed_token_ids": text(allowed_token_ids=[70, 71, 72, 73], logprobs=1),
    "bad_words": text(bad_words=["e", "the"]),
    "stop": text(**SEEDED, allowed_token_ids=[68, 69, 70, 71], stop=["e", "fg"]),
    "stop, kept": text(
        **SEEDED, allowed_token_ids=[68, 69, 70, 71], stop="e", include_stop_str_in_output=True
    ),
    "stop_token_ids": text(allowed_token_ids=[70, 71], stop_token_ids=[71], **SEEDED),
    "min_tokens": text(**SEEDED, ignore_eos=False, min_tokens=15),
    "truncated": (COMPLETIONS, question(IDS, truncate_prompt_tokens=12)),
    "tokens as ids": text(logprobs=2, return_tokens_as_token_ids=True),
    "no text": text(detokenize=False),
    "schema": (COMPLETIONS, question(IDS, response_format=FORMAT, **ENDS, logprobs=1)),
    "unknown keys": text(user="somebody", no_such_key={"a": 1}),
    "chat": chat(),
    "chat, seeded": chat(**SEEDED, **PENALTIES, logprobs=True, top_logprobs=3),
    "chat, n": chat(**SEEDED, n=3),
    "chat, stop": chat(**SEEDED, allowed_token_ids=[68, 69, 70], stop=["e"]),
    "chat, new length": chat(max_completion_tokens=7),
    "chat, schema": chat(response_format=FORMAT, **ENDS),
    "chat, object": chat(response_format={"type": "json_object"}, **ENDS),
    "chat, prompt_logprobs": chat(prompt_logprobs=1),
    "chat, continued": chat(
        messages=[*TURNS, {"role": "assistant", "content": "it is"}],
        continue_final_message=True,
        add_generation_prompt=False,
    ),
    "chat, tools": chat(tools=TOOLS, tool_choice="auto"),
}

POSTED: list[tuple[str, Any]] = [
    *((COMPLETIONS, body) for body in (*MALFORMED, *(it for it, _, _ in WRONG_REQUESTS))),
    (COMPLETIONS, question(TEXT, suffix="dog")),
    (COMPLETIONS, question(TEXT, best_of=3)),
    (COMPLETIONS, question(TEXT, model="gpt-4")),
    (COMPLETIONS, question(TEXT, prompt_logprobs=1, stream=True)),
    (COMPLETIONS, question([TEXT] * 5000)),
    (COMPLETIONS, question(TEXT, stop=[""])),
    (COMPLETIONS, question(TEXT, guided_regex="(a")),
    (COMPLETIONS, question(TEXT, logit_bias={"x": 1})),
    (CHAT, b"{"),
    (CHAT, {"model": "tiny"}),
    (CHAT, {"model": "gpt-4", "messages": TURNS}),
    (CHAT, {"model": "tiny", "messages": []}),
    (CHAT, {"model": "tiny", "messages": "hello"}),
    (CHAT, {"model": "tiny", "messages": [{"content": "hello"}]}),
    (CHAT, {"model": "tiny", "messages": TURNS * 60}),
    (CHAT, {"model": "tiny", "messages": TURNS, "top_logprobs": 2}),
    (CHAT, {"model": "tiny", "messages": TURNS, "tool_choice": "required"}),
    (CHAT, {"model": "tiny", "messages": TURNS, "tools": [{"type": "function"}]}),
    (CHAT, {"model": "tiny", "messages": TURNS, "prompt_logprobs": 1, "stream": True}),
    ("/tokenize", {"model": "tiny", "prompt": TEXT, "return_token_strs": True}),
    ("/tokenize", {"model": "tiny", "messages": TURNS}),
    ("/tokenize", {"model": "gpt-4", "prompt": TEXT}),
    ("/tokenize", {}),
    ("/detokenize", {"model": "tiny", "tokens": IDS}),
    ("/detokenize", {"model": "tiny", "tokens": ["a"]}),
    ("/v1/embeddings", {"model": "tiny", "input": TEXT}),
    ("/v1/responses", {"model": "tiny", "input": TEXT, "previous_response_id": "resp_1"}),
    ("/v1/messages", {"model": "tiny", "messages": TURNS}),
    ("/v1/embeddings", {"model": "tiny", "input": TEXT}),
    ("/v1/models", {}),
]
GOT = (
    *("/v1/models", "/v1/models/tiny", "/v1/models/gpt-4", "/version", "/health", "/ping"),
    *("/ready", "/load", "/v1", "/v1/nothing", COMPLETIONS, CHAT, "/tokenize"),
)


@dataclass(slots=True, frozen=True)
class Reply:
    """A reply as it came; `headers` without those that tell of time and length."""

    status: int
    headers: Mapping[str, str]
    text: str

    def comparable(self) -> tuple[int, Mapping[str, str], Any]:
        """The parts of the reply that two servers must have in common."""
        is_json = self.headers.get("content-type") == "application/json"
        # A proxy and a node serve other paths besides, which a 404 lists.
        body, listed = self.text, self.text.partition("; what is: ")
        if listed[1] and self.status == 404:
            return self.status, self.headers, listed[0]
        return self.status, self.headers, without(json.loads(body)) if is_json else body

    def events(self) -> list[dict[str, Any]]:
        """The events of a stream that came to its end."""
        *events, done = self.text.strip().split("\n\n")
        assert (self.status, done) == (200, "data: [DONE]"), self.text
        return [json.loads(event.removeprefix("data: ")) for event in events]


def without(reply: Any, names: tuple[str, ...] = LIVES) -> Any:
    """A reply without these keys at any depth."""
    if isinstance(reply, dict):
        return {key: without(value, names) for key, value in reply.items() if key not in names}
    return [without(it, names) for it in reply] if isinstance(reply, list) else reply


class Asker:
    """Raw HTTP: a connection for each question, all with the same key and label."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session

    async def __call__(
        self, server: ServerProcess, path: str, body: Any = None, *, method: str = "POST"
    ) -> Reply:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        async with self._session.request(method, server.url + path, data=data) as reply:
            told = {key.lower(): value for key, value in reply.headers.items()}
            headers = {key: told[key] for key in told if key not in ("date", "content-length")}
            return Reply(reply.status, headers, await reply.text())


@pytest.fixture
async def ask(served: ServedCluster) -> Any:
    headers = {
        "Authorization": f"Bearer {API_KEY}",
        "Content-Type": "application/json",
        "X-Request-Id": "conformance",
        "Connection": "close",
    }
    async with aiohttp.ClientSession(headers=headers, timeout=TIMEOUT) as session:
        yield Asker(session)


@pytest.mark.parametrize("path", everyday((COMPLETIONS, CHAT), (CHAT,)))
async def test_every_reply_is_that_of_one_node_whole_and_streamed(
    served: ServedCluster, ask: Asker, path: str
) -> None:
    pulls = served.d.metrics()[PULLS]
    asked = {name: body for name, (endpoint, body) in ASKED.items() if endpoint == path}
    for name, body in asked.items():
        await assert_conforms(served, ask, path, body, name=name)
    assert served.d.metrics()[PULLS] > pulls + len(asked)


async def assert_conforms(
    served: ServedCluster, ask: Asker, path: str, body: dict[str, Any], *, name: str
) -> None:
    whole = await ask(served.proxy, path, body)
    assert whole.status == 200, (name, whole.text)
    assert whole.comparable() == (await ask(served.d, path, body)).comparable(), name
    if "prompt_logprobs" in body:
        return
    expected = without(json.loads(whole.text), LIVES)
    for server in (served.proxy, served.d):
        events = (await ask(server, path, {**body, "stream": True, **USAGE})).events()
        assert len({(it["id"], it["created"], it["model"]) for it in events}) == 1
        assert added_up(without(events, LIVES)) == expected, (name, server.name)


def added_up(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The whole reply of which these are the chunks; the last one has its usage."""
    *chunks, last = events
    assert not last["choices"] and all(it["usage"] is None for it in chunks)
    whole = {**chunks[0], **last, "object": last["object"].removesuffix(".chunk")}
    pieces: dict[int, list[dict[str, Any]]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            pieces.setdefault(piece["index"], []).append(piece)
    return {**whole, "choices": [joined(pieces[index]) for index in sorted(pieces)]}


def joined(pieces: list[dict[str, Any]]) -> dict[str, Any]:
    """A choice: its texts and lists one after the other, of all else what was said last."""
    assert [it["finish_reason"] for it in pieces[:-1]] == [None] * (len(pieces) - 1)
    choice: dict[str, Any] = {}
    for piece in pieces:
        choice = grown(choice, piece)
    if "delta" in choice:
        message = choice.pop("delta")
        calls = message.pop("tool_calls", None)
        message["content"] = message.get("content") or (None if calls else "")
        choice["message"] = {**message, **({"tool_calls": calls} if calls else {})}
    return choice


def grown(known: dict[str, Any], news: dict[str, Any]) -> dict[str, Any]:
    """`known` with what a chunk adds."""
    return {**known, **{key: merged(known.get(key), value, key) for key, value in news.items()}}


def merged(known: Any, value: Any, key: str) -> Any:
    if known is None or value is None:
        return known if value is None else value
    if isinstance(value, dict):
        return grown(known, value)
    return known + value if isinstance(value, list) or key in ("text", "content") else value


async def test_every_refusal_and_every_list_is_that_of_one_node(
    served: ServedCluster, ask: Asker
) -> None:
    asked = [(path, body, "POST") for path, body in POSTED] + [(path, None, "GET") for path in GOT]
    for path, body, method in asked:
        pair, alone = [await ask(it, path, body, method=method) for it in (served.proxy, served.d)]
        assert pair.comparable() == alone.comparable(), (path, str(body)[:200])
        assert pair.status < 500, (path, str(body)[:200])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["completions", "chat"])
async def test_the_openai_client_gets_the_same_of_both(
    served: ServedCluster, kind: str, stream: bool
) -> None:
    _, body = ASKED["seeded" if kind == "completions" else "chat, seeded"]
    api = openai.resources if kind == "completions" else openai.resources.chat
    known = inspect.signature(api.Completions.create).parameters
    asked = {key: value for key, value in body.items() if key in known}
    asked["extra_body"] = {key: value for key, value in body.items() if key not in known}
    if stream:
        asked |= {"stream": True, **USAGE}
    replies = []
    for server in (served.proxy, served.d):
        replies.append(await asyncio.to_thread(by_sync_client, server, kind, asked))
        async with client_of(server.url, API_KEY) as client:
            reply = await resource(client, kind).create(**asked)
            replies.append(
                [it.model_dump() async for it in reply] if stream else [reply.model_dump()]
            )
    added = [without(added_up(it) if stream else it[0]) for it in replies]
    assert added[1:] == added[:1] * 3


def by_sync_client(server: ServerProcess, kind: str, asked: dict[str, Any]) -> list[dict[str, Any]]:
    http = openai.DefaultHttpxClient(verify=False)  # loading certificates takes a while
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=API_KEY, http_client=http) as client:
        reply = resource(client, kind).create(**asked)
        return [it.model_dump() for it in reply] if "stream" in asked else [reply.model_dump()]


def resource(client: Any, kind: str) -> Any:
    return client.completions if kind == "completions" else client.chat.completions
