"""A prefill or decode server as SGLang 0.5.23 answers over HTTP, without a model.

D waits for P's part of its room without end, as the real one does for half an hour: a D that nobody
ends shows as a hang. P answers when D has come to the room.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.workers.worker_double import Asked, Page, WorkerDouble, answer_to, json_reply

ROOM_KEYS = ("bootstrap_host", "bootstrap_port", "bootstrap_room")


@dataclass(slots=True, eq=False)
class Room:
    """One request's place at P: the body that P got, and what has happened."""

    body: dict[str, Any]
    prefilled: asyncio.Event = field(default_factory=asyncio.Event)
    taken: asyncio.Event = field(default_factory=asyncio.Event)


@dataclass(slots=True, eq=False)
class SglangDouble(WorkerDouble):
    """`rooms`: by host, port and room, shared by P and D."""

    rooms: dict[tuple[str, int, int], Room] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    mode: str = ""
    is_incremental: bool = False
    has_ready: bool = True
    lingers_s: float = 0.0
    aborted: list[str] = field(default_factory=list)
    _running: dict[str, asyncio.Event] = field(default_factory=dict)

    backend = "sglang"
    path = "/generate"

    def pages(self) -> dict[str, Page]:
        return {
            "/ready": self._ready,
            "/health": self._health,
            "/server_info": self._server_info,
            "/model_info": self._model_info,
            "/v1/models": self._models,
            "/v1/loads": self._loads,
            "/abort_request": self._abort,
            "/flush_cache": self._flush,
        }

    def error_body(self, message: str, status: int) -> bytes:
        """As HTTP errors of the server are written; in a stream, where there is no status."""
        if self.fault is not None and self.fault.kind == "error":
            return json.dumps({"error": {"message": message, "code": status}}).encode()
        return json.dumps({"object": "error", "message": message, "code": status}).encode()

    async def answer(self, asked: Asked, request: web.Request) -> web.StreamResponse:
        body = asked.body
        rid = body["rid"]
        self.expect(not any(it.startswith(rid) for it in self._running), "no rid begins another")
        self._running[rid] = asyncio.Event()
        try:
            self.expect(0 <= body["bootstrap_room"] < 2**63, "rooms have 63 bits")
            if self.kind == "prefill":
                return await self._prefill(asked, rid)
            return await self.stream(asked, request, self._events(asked, rid))
        finally:
            del self._running[rid]

    async def _prefill(self, asked: Asked, rid: str) -> web.Response:
        body = asked.body
        key = _key_of(body)
        self.expect(body["bootstrap_port"] == self.port + 1, "P's bootstrap port is its own")
        self.expect(key not in self.rooms, "each room is new")
        self.rooms[key] = room = Room(body)
        room.prefilled.set()
        self.news.set()
        if not asked.is_canary and (fault := self._fault_at(0)) is not None:
            room.prefilled.clear()
            await asyncio.sleep(self.lingers_s)
            await self._fail(fault)
        if await self._is_aborted(asked, rid, room.taken):
            return json_reply(_abort("Abort in waiting queue"))
        await asyncio.sleep(self.lingers_s)
        meta = {"id": rid, "finish_reason": {"type": "length", "length": 1}, "cached_tokens": 7}
        return json_reply({"text": "", "output_ids": [1], "meta_info": meta})

    async def _events(self, asked: Asked, rid: str) -> AsyncGenerator[tuple[int, bytes], None]:
        body = asked.body
        room = await self._room_of(body, rid) if self.moves_keys else Room(body)
        if room is None or (self.moves_keys and await self._is_aborted(asked, rid, room.prefilled)):
            asked.end = "aborted"
            yield 0, json.dumps(_abort("Abort in waiting queue")).encode()
            return
        same = {key: value for key, value in body.items() if key != "stream"}
        others = {key: value for key, value in room.body.items() if key != "stream"}
        self.expect(same == others, "both get the same request")
        room.taken.set()
        tokens, limit = self._tokens(body), body["sampling_params"]["max_new_tokens"]
        for count in range(1, len(tokens) + 1):
            is_last = count == len(tokens)
            first = count - 1 if self.is_incremental else 0
            kind = "length" if len(tokens) == limit else "stop"
            meta: dict[str, Any] = {
                "id": rid,
                "finish_reason": {"type": kind} if is_last else None,
                "completion_tokens": count,
                "cached_tokens": self.num_cached,
            }
            if body.get("return_logprob"):
                rows = [[-0.5, token, None] for token in tokens[first:count]]
                meta["output_token_logprobs"] = rows
                meta["output_top_logprobs"] = [[row] for row in rows]
            event = {"text": "?", "output_ids": tokens[first:count], "meta_info": meta}
            yield count, json.dumps(event).encode()

    async def _room_of(self, body: dict[str, Any], rid: str) -> Room | None:
        """The room, once P is in it, however long that takes; None if the request is aborted."""
        while (room := self.rooms.get(_key_of(body))) is None:
            if self._running[rid].is_set():
                return None
            await asyncio.sleep(0.005)
        return room

    async def _is_aborted(self, asked: Asked, rid: str, event: asyncio.Event) -> bool:
        """Waits for `event`; True if an abort comes first."""
        waits = [asyncio.ensure_future(it.wait()) for it in (event, self._running[rid])]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        if event.is_set():
            return False
        asked.end = "aborted"
        return True

    def _tokens(self, body: dict[str, Any]) -> list[int]:
        prompt, count = body["input_ids"], body["sampling_params"]["max_new_tokens"]
        if self.eos_length is not None:
            count = min(count, self.eos_length - len(prompt))
        return answer_to(prompt, count)

    async def _ready(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health if self.has_ready else 404)

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _server_info(self, request: web.Request) -> web.Response:
        state = {"disaggregation_mode": self.mode or self.kind}
        return json_reply(
            {
                "disaggregation_mode": self.kind,
                "disaggregation_bootstrap_port": self.port + 1,
                "disaggregation_transfer_backend": "nixl" if self.moves_keys else "fake",
                "startup_time": {"load_weight": 3.5 + self.life, "scheduler_e2e": 9.25},
                "random_seed": 1,
                "internal_states": [state],
                "kv_events": None,
                "version": "0.5.23",
            }
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return json_reply({"model_path": "/models/tiny", "tokenizer_path": "/models/tiny"})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "root": self.model, "max_model_len": 4096}
        return json_reply({"object": "list", "data": [card]})

    async def _loads(self, request: web.Request) -> web.Response:
        load = {"dp_rank": 0, "num_running_reqs": len(self.open), "token_usage": 0.25}
        return json_reply({"loads": [load]})

    async def _abort(self, request: web.Request) -> web.Response:
        rid = json.loads(await request.read())["rid"]
        self.aborted.append(rid)
        for name, event in self._running.items():
            if name.startswith(rid):
                event.set()
        return web.Response()

    async def _flush(self, request: web.Request) -> web.Response:
        self.reset += 1
        return web.Response(text="Cache flushed.\n")


def _key_of(body: dict[str, Any]) -> tuple[str, int, int]:
    host, port, room = (body[key] for key in ROOM_KEYS)
    return host, port, room


def _abort(message: str) -> dict[str, Any]:
    reason = {"type": "abort", "message": message, "status_code": None, "err_type": None}
    meta = {"finish_reason": reason, "completion_tokens": 0}
    return {"text": "", "output_ids": [], "meta_info": meta}
