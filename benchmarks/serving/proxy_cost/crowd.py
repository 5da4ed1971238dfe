"""Many nodes without a model in one process: `python -m ... KIND COUNT [silent]`, for `members`.

Each has its own gRPC port, publisher of KV events (none if `silent`) and registration, as a real
node has. They answer at once, hold the prompts that they were asked for, and tell of it.
"""

import asyncio
import logging
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack

import structlog
import uvloop
from msgspec import structs
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from benchmarks.serving.proxy_cost.loopback import HOST, serve
from benchmarks.serving.proxy_cost.upstream import FILES, Script, ScriptedNode, Steps
from benchmarks.support.model_folders import DEMO_MODEL
from engine.kv_cache.prefix import PrefixDigests, PrefixHasher
from engine.types import GenerateOutput, GenerateRequest, KVTransferStats
from serving.api.tokenizer import load_tokenizer
from serving.config import KVEventsConfig
from serving.kv_events.publisher import EventPublisher
from serving.kv_events.wire import FULL_ATTENTION, GPU, BlockRemoved, BlockStored, Event
from serving.rpc.messages import KVEventsInfo, KVGroupInfo, NodeInfo
from serving.rpc.node_service import NodeService
from serving.rpc.registration import Introduction, Registration
from serving.rpc.server import start_server

BLOCK = 16
MAX_HELD = 2000
"""Blocks; a node that holds more drops its oldest."""
PULLED = KVTransferStats(attention_bytes=1)


class NoSteps(Steps):
    """Tokens come at once: the latency is the proxy's, and that of the calls to nodes."""

    async def next(self) -> None:
        return


class Cache:
    """The blocks that a node holds, told by its own publisher."""

    def __init__(self, engine_id: str) -> None:
        self.publisher = EventPublisher(KVEventsConfig(), engine_id, HOST)
        self._hasher = PrefixHasher(BLOCK)
        self._held: dict[bytes, None] = {}

    @property
    def info(self) -> KVEventsInfo:
        assert self.publisher.endpoint is not None
        return KVEventsInfo(
            endpoint=self.publisher.endpoint,
            replay_endpoint=self.publisher.replay_endpoint,
            hash_block_size=BLOCK,
            groups=(KVGroupInfo(FULL_ATTENTION),),
        )

    def add(self, request: GenerateRequest) -> None:
        """The prompt of a request is cached, as at the end of the step that has computed it."""
        tokens = list(request.prompt_token_ids)
        digests = PrefixDigests(self._hasher, tokens, request.cache_salt).boundaries()
        first = next((k for k, it in enumerate(digests[1:]) if it not in self._held), None)
        if first is None:
            return
        new = tuple(digests[first + 1 :])
        self._held.update(dict.fromkeys(new))
        stored = BlockStored(
            block_hashes=new,
            parent_block_hash=digests[first] if first else None,
            token_ids=tuple(tokens[first * BLOCK : (len(digests) - 1) * BLOCK]),
            block_size=BLOCK,
            medium=GPU,
            group_idx=0,
        )
        events: list[Event] = [stored]
        if (num_over := len(self._held) - MAX_HELD) > 0:
            oldest = tuple(digest for digest, _ in zip(self._held, range(num_over), strict=False))
            for digest in oldest:
                del self._held[digest]
            events.append(BlockRemoved(block_hashes=oldest, medium=GPU, group_idx=0))
        self.publisher.publish(events)


class Member:
    """A scripted node that pulls prefills, has a cache and tells of it, if it is not silent."""

    def __init__(self, node: ScriptedNode, cache: Cache | None) -> None:
        self.node = node
        self._cache = cache

    @property
    def url(self) -> str:
        return f"grpc://{HOST}:{self.node.port}"

    def describe(self) -> NodeInfo:
        told = None if self._cache is None else self._cache.info
        return structs.replace(self.node.describe(), kv_events=told)

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        params = request.kv_transfer_params
        is_pull = params is not None and params.do_remote_prefill
        async for output in self.node.generate(request):
            if output.finish_reason is not None and self._cache is not None:
                self._cache.add(request)
            yield structs.replace(output, kv_transfer=PULLED) if is_pull else output


class Crowd:
    """The members of one process, and the HTTP routes by which the benchmark leads them."""

    def __init__(self, members: list[Member]) -> None:
        self._members = members
        self._registrations: list[Registration] = []
        self.app = Starlette(
            routes=[
                Route("/nodes", self._tell_nodes),
                Route("/join", self._join, methods=["POST"]),
            ]
        )

    async def leave(self) -> None:
        await asyncio.gather(*(it.leave() for it in self._registrations))

    async def _tell_nodes(self, request: Request) -> Response:
        return JSONResponse([it.url for it in self._members])

    async def _join(self, request: Request) -> Response:
        """All register at once with the proxy whose URL is the body."""
        proxy = (await request.body()).decode()
        for it in self._members:
            introduction = Introduction(it.node.engine_id, it.node.kind, it.url)
            registration = Registration(introduction, token=None, tls=None)
            registration.register_with([proxy])
            self._registrations.append(registration)
        return Response()


async def main(kind: str, count: str, *words: str) -> None:
    """`count` nodes, until SIGTERM."""
    # All of them say often how far they are.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    script = Script(load_tokenizer(DEMO_MODEL), NoSteps())
    files = {name: (DEMO_MODEL / name).read_bytes() for name in FILES}
    members = []
    async with AsyncExitStack() as stack:
        for number in range(int(count)):
            node = ScriptedNode(kind, script, engine_id=f"{kind}-{number}")
            cache = None if "silent" in words else Cache(node.engine_id)
            if cache is not None:
                stack.callback(cache.publisher.close)
            member = Member(node, cache)
            service = NodeService(member, member.describe, files)
            server = await start_server([service], HOST, 0, token=None)
            stack.push_async_callback(server.close)
            node.port = server.port
            members.append(member)
        crowd = Crowd(members)
        stack.push_async_callback(crowd.leave)
        await serve(crowd.app)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main(*sys.argv[1:]))
