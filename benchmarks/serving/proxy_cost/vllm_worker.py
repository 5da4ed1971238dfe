"""A worker that answers as `vllm serve` 0.32 does and computes nothing: `python -m ...`.

P and D are one such process each. Words, order and sizes are vLLM's: P's parameters have a list of
blocks for each group of a hybrid model, and whoever asks for token ids gets the prompt's back too,
with the first event. All streams get their tokens at the same moment (`upstream.Steps`).
"""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.serving.proxy_cost.loopback import HOST, serve
from benchmarks.serving.proxy_cost.upstream import MAX_MODEL_LEN, NAME, Script, Steps
from benchmarks.support.model_folders import DEMO_MODEL
from serving.api.tokenizer import load_tokenizer

BLOCK = 16
JSON = "application/json"
# The samples of vLLM's page that a proxy looks for; `pulled` and `computed` are prompt tokens.
METRICS = """
process_start_time_seconds {started}
vllm:num_requests_running{{engine="0",model_name="{name}"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="{name}"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="{name}"}} 0.0
vllm:cache_config_info{{block_size="{block}",mamba_cache_mode="none"}} 1.0
vllm:prompt_tokens_by_source_total{{engine="0",source="external_kv_transfer"}} {pulled}
vllm:prompt_tokens_by_source_total{{engine="0",source="local_compute"}} {computed}
"""


class Worker:
    """One worker's HTTP API."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._started = time.time()
        self._num_pulled = self._num_computed = 0
        self._numbers = itertools.count()
        self.app = Starlette(
            routes=[
                Route("/health", self._tell_health),
                Route("/metrics", self._tell_metrics),
                Route("/v1/models", self._tell_models),
                Route("/v1/completions", self._complete, methods=["POST"]),
            ]
        )

    async def _tell_health(self, request: Request) -> Response:
        return Response()

    async def _tell_metrics(self, request: Request) -> Response:
        page = METRICS.format(
            started=self._started,
            name=NAME,
            block=BLOCK,
            pulled=self._num_pulled,
            computed=self._num_computed,
        )
        return Response(page, media_type="text/plain")

    async def _tell_models(self, request: Request) -> Response:
        card = {"id": NAME, "object": "model", "root": NAME, "max_model_len": MAX_MODEL_LEN}
        return JSONResponse({"object": "list", "data": [card]})

    async def _complete(self, request: Request) -> Response:
        asked = msgspec.json.decode(await request.body())
        params = asked.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            self._num_pulled += params["remote_num_tokens"]
        else:
            self._num_computed += len(asked["prompt"])
        head = {
            "id": f"cmpl-{request.headers.get('x-request-id', next(self._numbers))}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": NAME,
        }
        if asked.get("stream"):
            return StreamingResponse(self._events(head, asked), media_type="text/event-stream")
        choices = [it async for it in self._choices(asked)]
        whole = choices[-1] | {"text": "".join(it["text"] for it in choices)}
        if whole["token_ids"] is not None:
            whole["token_ids"] = [token for it in choices for token in it["token_ids"]]
        whole["prompt_token_ids"] = choices[0]["prompt_token_ids"]
        told = _params(request, asked) if params.get("do_remote_decode") else None
        answer = {**head, "choices": [whole], "usage": _usage(asked), "kv_transfer_params": told}
        return Response(msgspec.json.encode(answer), media_type=JSON)

    async def _events(self, head: dict[str, Any], asked: dict[str, Any]) -> AsyncIterator[bytes]:
        async for choice in self._choices(asked):
            yield _event({**head, "choices": [choice]})
        if (asked.get("stream_options") or {}).get("include_usage"):
            yield _event({**head, "choices": [], "usage": _usage(asked)})
        yield b"data: [DONE]\n\n"

    async def _choices(self, asked: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One for each token."""
        tells_ids = asked.get("return_token_ids")
        prompt = asked["prompt"] if tells_ids else None
        async for token, text, is_last in self._script.tokens(asked["max_tokens"]):
            yield {
                "index": 0,
                "text": text,
                "logprobs": None,
                "finish_reason": "length" if is_last else None,
                "stop_reason": None,
                "prompt_token_ids": prompt,
                "token_ids": [token] if tells_ids else None,
            }
            prompt = None


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def _usage(asked: dict[str, Any]) -> dict[str, Any]:
    num_prompt, num_output = len(asked["prompt"]), asked["max_tokens"]
    return {
        "prompt_tokens": num_prompt,
        "total_tokens": num_prompt + num_output,
        "completion_tokens": num_output,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _params(request: Request, asked: dict[str, Any]) -> dict[str, Any]:
    """Of a hybrid model: many blocks of attention, and one of each group of Mamba layers."""
    num_tokens = len(asked["prompt"])
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(range(-(-num_tokens // BLOCK))), [1], [2], [3]],
        "remote_engine_id": "00000000-0000-0000-0000-000000000000",
        "remote_request_id": f"cmpl-{request.headers['x-request-id']}-0-00000000",
        "remote_host": HOST,
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": num_tokens - 1,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "remote_prefill_cached_tokens": 0,
    }


async def main() -> None:
    """One worker, until SIGTERM."""
    steps = Steps()
    stepping = asyncio.create_task(steps.run())
    try:
        await serve(Worker(Script(load_tokenizer(DEMO_MODEL), steps)).app)
    finally:
        stepping.cancel()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
