"""Nodes without a model on real gRPC ports, and a real proxy in front of them."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import openai
from prometheus_client.parser import text_string_to_metric_families

from connector.pd.prefill.control_handler import ControlHandler
from connector.pd.prefill.control_service import ControlService
from connector.pd.wire.messages import BlockRange, Digests, Handshake, HeldBlocks
from engine.errors import KVTransferParamsError, TandemError
from engine.types import (
    FinishReason,
    GenerateOutput,
    GenerateRequest,
    HandOverProblem,
    KVTransferParams,
    KVTransferStats,
)
from proxy.config import ProxyConfig
from proxy.server import ProxyServer
from serving.config import load_config
from serving.rpc.messages import KVEventsInfo, NodeInfo
from serving.rpc.node_service import NodeService
from serving.rpc.server import RpcServer, RpcService, start_server

VOCAB_SIZE = 300
PROMPT = [5, 6, 7]
ASK: dict[str, Any] = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
IDS = {"return_token_ids": True}
WAIT_S = 10.0
POLL_S = 0.05


def token_at(prompt: Sequence[int], position: int) -> int:
    """The token of every scripted node: a function of prompt and position."""
    return 70 + (sum(prompt) + 7 * position) % 26


def tokens_of(prompt: Sequence[int], count: int) -> list[int]:
    return [token_at(prompt, position) for position in range(count)]


@dataclass(slots=True)
class ScriptedNode(ControlHandler):
    """A node that follows `token_at`; `error` and `hang_at` make its next requests fail."""

    name: str
    kind: str = "decode"
    model: str = "tiny"
    vocab_size: int = VOCAB_SIZE
    token: str | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    ready: bool = True
    problems: tuple[HandOverProblem, ...] = ()
    max_model_len: int = 4096
    num_cached: int = 0
    num_lost_to_state: int = 0
    num_cached_of_pull: int = 0
    kv_events: KVEventsInfo | None = None
    model_identity: str = ""
    eos_at: int | None = None
    gives_params: bool = True
    error: TandemError | None = None
    refuses_params: TandemError | None = None
    fail_at: int = 0
    hang_at: int | None = None
    hanging: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    requests: list[GenerateRequest] = field(default_factory=list)
    released: list[tuple[str, str, str]] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    ranges: list[BlockRange] = field(default_factory=list)
    is_slow: bool = False
    left: threading.Event = field(default_factory=threading.Event)
    num_open: int = 0
    num_cut: int = 0
    rpc: RpcServer | None = None

    @property
    def engine_id(self) -> str:
        return f"{self.name}-incarnation"

    @property
    def port(self) -> int:
        assert self.rpc is not None
        return self.rpc.port

    @property
    def url(self) -> str:
        return f"grpc://127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> None:
        services: list[RpcService] = [
            NodeService(self, self.describe, self.files),
            ControlService(self),
        ]
        self.rpc = await start_server(services, "127.0.0.1", port, token=self.token)

    async def close(self) -> None:
        if self.rpc is not None:
            await self.rpc.close()

    def describe(self) -> NodeInfo:
        return NodeInfo(
            engine_id=self.engine_id,
            kind=self.kind,
            model_names=(self.model,),
            max_model_len=self.max_model_len,
            vocab_size=self.vocab_size,
            num_requests_running=self.num_open,
            ready=self.ready,
            reason="" if self.ready else "draining",
            hand_over_problems=self.problems,
            kv_events=self.kv_events,
            model_identity=self.model_identity,
        )

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        self.requests.append(request)
        params = request.kv_transfer_params
        if self.refuses_params is not None and params is not None and params.do_remote_prefill:
            raise self.refuses_params
        self.num_open += 1
        cut = True
        try:
            for position, output in enumerate(self._outputs(request)):
                if self.error is not None and position == self.fail_at:
                    cut = False
                    raise self.error
                await self._maybe_hang(position)
                yield output
            cut = False
        finally:
            self.num_open -= 1
            self.num_cut += cut

    async def _maybe_hang(self, position: int) -> None:
        if position == self.hang_at:
            self.hanging.set()
            await self.go_on.wait()

    def _outputs(self, request: GenerateRequest) -> list[GenerateOutput]:
        params = request.kv_transfer_params
        count = request.sampling.max_tokens
        if self.eos_at is not None:
            count = min(count, self.eos_at + 1)
        tokens = tokens_of(request.prompt_token_ids, count)[len(request.output_token_ids) :]
        outputs = [
            GenerateOutput(
                token_ids=(token,),
                num_cached_tokens=self.num_cached,
                num_tokens_lost_to_state=self.num_lost_to_state,
            )
            for token in tokens
        ]
        stopped = self.eos_at is not None and count == self.eos_at + 1
        last: dict[str, Any] = {
            "token_ids": outputs[-1].token_ids,
            "num_cached_tokens": self.num_cached,
            "num_tokens_lost_to_state": self.num_lost_to_state,
            "finish_reason": FinishReason.STOP if stopped else FinishReason.LENGTH,
        }
        if params is not None and params.do_remote_decode and self.gives_params and not stopped:
            last["kv_transfer_params"] = self._params(request, tokens[0])
        if params is not None and params.do_remote_prefill:
            last["kv_transfer"] = KVTransferStats(
                attention_bytes=64,
                state_bytes=32,
                prefill_cached_tokens=params.remote_num_cached_tokens or 0,
                decode_cached_tokens=self.num_cached_of_pull,
            )
        return [*outputs[:-1], GenerateOutput(**last)]

    def _params(self, request: GenerateRequest, token: int) -> KVTransferParams:
        return KVTransferParams(
            do_remote_prefill=True,
            remote_engine_id=self.engine_id,
            remote_request_id=f"{self.name}-{len(self.requests)}",
            remote_host="127.0.0.1",
            remote_port=self.port,
            remote_num_tokens=len(request.token_ids),
            first_token_ids=(token,),
            remote_num_cached_tokens=self.num_cached,
        )

    def handshake(self, wanted: Sequence[str] = ()) -> Handshake:
        return Handshake(
            engine_id=self.engine_id,
            transport="shm",
            transport_address=b"\x00\xff",
            geometry={"block_size": "16"},
            lease_s=30.0,
        )

    def claim(self, engine_id: str, request_id: str) -> HeldBlocks:
        if engine_id != self.engine_id:
            raise KVTransferParamsError(f"this is {self.engine_id}", code="foreign")
        return HeldBlocks(num_tokens=33, block_ids=((0, 2**63), (), (4096,)), generation=2**64 - 1)

    def renew(
        self, engine_id: str, request_ids: Sequence[str], generations: Sequence[int]
    ) -> Sequence[str]:
        self.generations += generations
        return [request_id for request_id in request_ids if request_id.startswith("lost")]

    def release(self, engine_id: str, request_id: str, reason: str, *, generation: int) -> bool:
        self.released.append((engine_id, request_id, reason))
        self.generations.append(generation)
        return True

    def digests(
        self,
        engine_id: str,
        request_id: str,
        generation: int,
        *,
        ranges: Sequence[BlockRange],
        left: threading.Event,
    ) -> Digests:
        self.left = left
        if self.is_slow:
            left.wait(WAIT_S)
        self.ranges += ranges
        return tuple((2**64 - 1 - generation,) * asked.end for asked in ranges)


@asynccontextmanager
async def running_nodes(*nodes: ScriptedNode) -> AsyncIterator[None]:
    try:
        for node in nodes:
            await node.start()
        yield
    finally:
        for node in nodes:
            await node.close()


@asynccontextmanager
async def running_proxy(config: ProxyConfig) -> AsyncIterator[str]:
    """Base URL of a proxy that has started, whether or not it is ready."""
    server = ProxyServer(config, poll_interval_s=POLL_S)
    await server.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        await server.close()


@asynccontextmanager
async def running_cluster(
    prefill: Sequence[ScriptedNode], decode: Sequence[ScriptedNode], **options: object
) -> AsyncIterator[openai.AsyncOpenAI]:
    """Started nodes, a proxy that uses all of them, and the client that users have."""
    async with running_nodes(*prefill, *decode):
        config = cluster_config(prefill, decode, **options)
        async with running_proxy(config) as base, client_of(base) as client:
            await until_status(f"{base}/ready", 200)
            await until_used(base, len(prefill) + len(decode))
            yield client


def cluster_config(
    prefill: Sequence[ScriptedNode], decode: Sequence[ScriptedNode], **options: object
) -> ProxyConfig:
    urls = {
        "prefill": tuple(node.url for node in prefill),
        "decode": tuple(node.url for node in decode),
    }
    own = {"port": 0, "drain_timeout": 0.5, "enable_prompt_tokens_details": True}
    return load_config(ProxyConfig, None, {**urls, **own, **options})


@asynccontextmanager
async def client_of(base: str, key: str = "none") -> AsyncIterator[openai.AsyncOpenAI]:
    http = openai.DefaultAsyncHttpxClient(verify=False)  # loading certificates takes a while
    async with openai.AsyncOpenAI(
        base_url=f"{base}/v1", api_key=key, max_retries=0, http_client=http
    ) as client:
        yield client


def base_of(client: openai.AsyncOpenAI) -> str:
    """The address of the proxy that a client of `running_cluster` asks."""
    return str(client.base_url).removesuffix("/v1/")


async def fetch(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url) as reply:
        return reply.status, await reply.text()


async def until_status(url: str, status: int) -> None:
    async def has_status() -> bool:
        return (await fetch(url))[0] == status

    await until(has_status)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for a condition that must become true; TimeoutError when it does not."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_used(base: str, count: int) -> None:
    """Waits until the proxy counts exactly `count` usable nodes."""

    async def are_used() -> bool:
        return sum(await metric(base, "tandem_proxy_available_nodes")) == count

    await until(are_used)


async def metric(base: str, name: str, **labels: str) -> list[float]:
    """Values of all samples of a metric that have these labels."""
    _, text = await fetch(f"{base}/metrics")
    return [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
