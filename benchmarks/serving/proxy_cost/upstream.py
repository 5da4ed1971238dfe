"""Servers behind both sides of `proxy_cost`: two nodes without a model, and an HTTP server.

All three answer the same tokens at the same pace; the HTTP server writes them as the proxy does.
"""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass, field

import msgspec
import uvloop
from msgspec import UNSET
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from benchmarks.serving.proxy_cost.loopback import HOST, serve
from benchmarks.support.model_folders import DEMO_MODEL
from engine.types import FinishReason, GenerateOutput, GenerateRequest, KVTransferParams
from serving.api.replies import CompletionChoice, CompletionReply
from serving.api.tokenizer import Tokenizer, load_tokenizer
from serving.rpc.messages import NodeInfo
from serving.rpc.node_service import NodeService
from serving.rpc.server import start_server

FILES = ("tokenizer.json", "tokenizer_config.json")
NAME = "bench"
VOCAB_SIZE = 151_936
MAX_MODEL_LEN = 32_768
DEMO_VOCAB_SIZE = 832
STEP_S = 0.04


@dataclass(slots=True)
class Steps:
    """Wakes all streams at once, every `STEP_S`, as the step of one engine does."""

    _next: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        for due in itertools.count(loop.time() + STEP_S, STEP_S):
            await asyncio.sleep(due - loop.time())
            self._next.set()
            self._next = asyncio.Event()

    async def next(self) -> None:
        await self._next.wait()


class Script:
    """The answer to every request: tokens that are words, over and over."""

    def __init__(self, tokenizer: Tokenizer, steps: Steps) -> None:
        texts = {token: tokenizer.token_text(token) for token in range(DEMO_VOCAB_SIZE)}
        self._words = [(token, it) for token, it in texts.items() if it.strip().isalpha()]
        self._steps = steps

    async def tokens(self, count: int) -> AsyncIterator[tuple[int, str, bool]]:
        """Id, text, and whether it is the last; the first at once, then one for each step."""
        for number, (token, text) in zip(range(count), itertools.cycle(self._words), strict=False):
            if number:
                await self._steps.next()
            yield token, text, number == count - 1


@dataclass(slots=True)
class ScriptedNode:
    """A `TokenSource`; a prefill node by what it is asked for, like any node."""

    kind: str
    script: Script
    engine_id: str
    port: int = 0

    def describe(self) -> NodeInfo:
        return NodeInfo(
            engine_id=self.engine_id,
            kind=self.kind,
            model_names=(NAME,),
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            ready=True,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        params = request.kv_transfer_params
        is_prefill = params is not None and params.do_remote_decode
        async for token, _, is_last in self.script.tokens(request.sampling.max_tokens):
            yield GenerateOutput(
                token_ids=(token,),
                finish_reason=FinishReason.LENGTH if is_last else None,
                kv_transfer_params=self._params(request, token) if is_prefill else None,
            )

    def _params(self, request: GenerateRequest, token: int) -> KVTransferParams:
        """Parameters as long as those of a real P."""
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_id,
            remote_request_id=request.request_id,
            remote_block_ids=(tuple(range(len(request.prompt_token_ids) // 16)), (1,)),
            remote_host=HOST,
            remote_port=self.port,
            remote_num_tokens=len(request.prompt_token_ids),
            remote_prompt_digest="0" * 64,
            remote_generation=1,
            first_token_ids=(token,),
            signature="0" * 64,
        )


class HttpServer:
    """The same answers over HTTP, in the bytes that the proxy writes."""

    def __init__(self, script: Script, nodes: dict[str, str]) -> None:
        self._script = script
        self._nodes = nodes
        self._numbers = itertools.count()
        routes = [
            Route("/v1/completions", self._complete, methods=["POST"]),
            Route("/nodes", self._tell_nodes),
        ]
        self.app = Starlette(routes=routes)

    async def _tell_nodes(self, request: Request) -> Response:
        """Where the nodes of this process listen, for the flags of the proxy."""
        return JSONResponse(self._nodes)

    async def _complete(self, request: Request) -> Response:
        asked = msgspec.json.decode(await request.body())
        bodies = self._bodies(asked["max_tokens"])
        if asked.get("stream"):
            return StreamingResponse(_events(bodies), media_type="text/event-stream")
        return Response([body async for body in bodies][-1], media_type="application/json")

    async def _bodies(self, count: int) -> AsyncIterator[bytes]:
        """One body for each token."""
        name, created = f"cmpl-{next(self._numbers):032d}", int(time.time())
        async for _, text, is_last in self._script.tokens(count):
            reason = FinishReason.LENGTH if is_last else None
            choice = CompletionChoice(index=0, text=text, finish_reason=reason)
            yield msgspec.json.encode(
                CompletionReply(
                    id=name,
                    object="text_completion",
                    created=created,
                    model=NAME,
                    choices=[choice],
                    usage=UNSET,
                )
            )


async def _events(bodies: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    async for body in bodies:
        yield b"data: " + body + b"\n\n"
    yield b"data: [DONE]\n\n"


async def main() -> None:
    """Two nodes and the HTTP server, until SIGTERM."""
    steps = Steps()
    script = Script(load_tokenizer(DEMO_MODEL), steps)
    files = {name: (DEMO_MODEL / name).read_bytes() for name in FILES}
    nodes = [ScriptedNode(kind, script, engine_id=kind) for kind in ("prefill", "decode")]
    started = [
        await start_server([NodeService(node, node.describe, files)], HOST, 0, token=None)
        for node in nodes
    ]
    urls = {}
    for node, server in zip(nodes, started, strict=True):
        node.port = server.port
        urls[node.kind] = f"grpc://{HOST}:{server.port}"
    stepping = asyncio.create_task(steps.run())
    try:
        await serve(HttpServer(script, urls).app)
    finally:
        stepping.cancel()
        for server in started:
            await server.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
