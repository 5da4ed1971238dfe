"""A worker as vLLM 0.32 with NixlConnector answers over HTTP, without a model.

Facts from live workers: P's parameters come only where it does not stream; D's engine dies of
parameters that are not P's own, or of other tokens than P computed; P's one token is no token of
the answer on a hybrid model; an engine that has died answers 500 until its port closes.
"""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.support.workers.worker_double import (
    VOCAB_SIZE,
    Asked,
    Page,
    WorkerDouble,
    answer_to,
    json_reply,
)

ENGINE_DIED = "EngineCore encountered an issue. See stack trace (above) for the root cause."
TOKEN_OF_P = 65
"""None that an answer has."""


@dataclass(slots=True, eq=False)
class VllmDouble(WorkerDouble):
    """`held`: by P's name of a prefill its parameters and tokens, shared by P and D."""

    held: dict[str, tuple[dict[str, Any], list[int]]] = field(default_factory=dict)
    gives_params: bool = True
    prefill_stops: bool = False
    num_pulled: int = 0
    num_prefilled: int = 0
    has_stats: bool = True  # without: --disable-log-stats

    backend = "vllm"
    path = "/v1/completions"

    def pages(self) -> dict[str, Page]:
        return {
            "/health": self._health,
            "/metrics": self._metrics,
            "/load": self._load,
            "/v1/models": self._models,
            "/kv_event_sources": self._event_sources,
            "/reset_prefix_cache": self._reset,
        }

    def error_body(self, message: str, status: int) -> bytes:
        error = {"message": message, "type": "BadRequestError", "param": None, "code": status}
        return json.dumps({"error": error}).encode()

    async def answer(self, asked: Asked, request: web.Request) -> web.StreamResponse:
        body, params = asked.body, asked.body.get("kv_transfer_params")
        prompt = body["prompt"]
        wrong = [token for token in prompt if not 0 <= token < VOCAB_SIZE]
        if wrong:
            message = f"Token id {wrong[0]} is out of vocabulary"
            return web.Response(status=400, body=self.error_body(message, 400))
        if params is not None and params.get("do_remote_decode"):
            return self._prefill(asked)
        if params is not None:
            self._pull(params, prompt)
        if not body["stream"]:
            return json_reply(self._whole(asked))
        return await self.stream(asked, request, self._events(asked))

    def _prefill(self, asked: Asked) -> web.Response:
        body = asked.body
        self.expect(self.kind == "prefill", "only P prefills for others")
        self.expect(body["stream"] is False, "P's part is not streamed")
        self.expect("stream_options" not in body, "P's part has no stream_options")
        self.expect(body["max_tokens"] == 1, "P makes one token")
        self.expect(body["min_tokens"] <= 1, "P ends after one token")
        self.num_prefilled += len(body["prompt"])
        name = f"cmpl-{asked.request_id}-0-{len(self.asked):08x}"
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [[1], [2, 3]],
            "remote_engine_id": f"engine-{self.port}-{self.life}",
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": 1,
            "remote_num_tokens": len(body["prompt"]),
            "of_a_later_version": {"a": [1, None, 2.5]},
        }
        answer = self._whole(asked, tokens=[TOKEN_OF_P])
        answer["choices"][0]["finish_reason"] = "stop" if self.prefill_stops else "length"
        if self.gives_params:
            self.held[name] = (params, body["prompt"])
            answer["kv_transfer_params"] = params
        return json_reply(answer)

    def _pull(self, params: dict[str, Any], prompt: list[int]) -> None:
        known = self.held.get(params.get("remote_request_id", ""))
        self.expect(self.kind == "decode", "only D pulls")
        self.expect(known == (params, prompt), f"D gets P's own words for its tokens, not {params}")
        if self.moves_keys:
            self.num_pulled += len(prompt)

    def _whole(self, asked: Asked, tokens: list[int] | None = None) -> dict[str, Any]:
        made = self._tokens(asked) if tokens is None else tokens
        choice = self._choice(asked.body, made)
        if asked.body.get("prompt_logprobs") is not None:
            rows = [
                None if not place else {str(token): {"logprob": -0.5, "rank": 1}}
                for place, token in enumerate(asked.body["prompt"])
            ]
            choice["prompt_logprobs"] = rows
        choice["finish_reason"] = self._reason(asked, made)
        return {"choices": [choice], "usage": self._usage(asked, len(made))}

    async def _events(self, asked: Asked) -> AsyncGenerator[tuple[int, bytes], None]:
        tokens = self._tokens(asked)
        self.expect(asked.body["return_token_ids"] is True, "answers are token ids")
        for place, token in enumerate(tokens):
            choice = self._choice(asked.body, [token])
            if place == len(tokens) - 1:
                choice["finish_reason"] = self._reason(asked, tokens)
            yield place + 1, json.dumps({"choices": [choice]}).encode()
        usage = {"choices": [], "usage": self._usage(asked, len(tokens))}
        yield len(tokens), json.dumps(usage).encode()

    def _tokens(self, asked: Asked) -> list[int]:
        prompt, count = asked.body["prompt"], asked.body["max_tokens"]
        if self.eos_length is not None:
            count = min(count, self.eos_length - len(prompt))
        return answer_to(prompt, count)

    def _reason(self, asked: Asked, tokens: list[int]) -> str:
        return "length" if len(tokens) == asked.body["max_tokens"] else "stop"

    def _choice(self, body: dict[str, Any], tokens: list[int]) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "?", "token_ids": tokens, "logprobs": None}
        if body.get("logprobs") is not None:
            names = [f"token_id:{token}" for token in tokens]
            tops = [{name: -0.5} for name in names]
            values = [-0.5] * len(names)
            choice["logprobs"] = {"tokens": names, "token_logprobs": values, "top_logprobs": tops}
        return choice | {"finish_reason": None, "stop_reason": None}

    def _usage(self, asked: Asked, count: int) -> dict[str, Any]:
        details = {"cached_tokens": self.num_cached}
        return {
            "prompt_tokens": len(asked.body["prompt"]),
            "completion_tokens": count,
            "prompt_tokens_details": details,
        }

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=self.health)

    async def _metrics(self, request: web.Request) -> web.Response:
        source = 'vllm:prompt_tokens_by_source_total{engine="0",source='
        lines = [
            f"process_start_time_seconds {1.7e9 + self.life}",
        ]
        own = [
            'vllm:cache_config_info{block_size="16",mamba_cache_mode="none"} 1.0',
            f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {len(self.open)}',
            f'{source}"local_compute"}} {self.num_prefilled}',
            f'{source}"external_kv_transfer"}} {self.num_pulled}',
        ]
        lines += own if self.has_stats else []
        return web.Response(text="\n".join(lines) + "\n")

    async def _load(self, request: web.Request) -> web.Response:
        return json_reply({"server_load": len(self.open)})

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "root": "/models/tiny", "max_model_len": 4096, "parent": None}
        return json_reply({"object": "list", "data": [card]})

    async def _event_sources(self, request: web.Request) -> web.Response:
        return json_reply({})

    async def _reset(self, request: web.Request) -> web.Response:
        self.reset += 1
        return json_reply({"success": True})
