"""A prefill and a decode node in two processes, asked over the nodes' own gRPC, without a proxy.

Knows requests and when their tokens came; not what is measured with them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import msgspec

from benchmarks.hand_over.stamped_node import NodeProcess, node_process
from benchmarks.support.tandem_engine import request_of
from engine.types import GenerateOutput, GenerateRequest, KVTransferParams, TokenId
from proxy.backends.tandem import prefill_request
from serving.config import KVTransferConfig, NodeConfig
from serving.rpc.client import NodeClient, StreamDeadlines

DEADLINES = StreamDeadlines()
LEASE_S = 120.0
Prompt = Sequence[TokenId]
Result = TypeVar("Result")


@dataclass(slots=True, frozen=True)
class Prefilled:
    """A prompt that P holds, and when its last output was here (monotonic seconds)."""

    request: GenerateRequest
    params: KVTransferParams
    answered: float


@dataclass(slots=True, frozen=True)
class Pair:
    """The two nodes and a client of each; the clients live on one event loop."""

    p: NodeProcess
    d: NodeProcess
    to_p: NodeClient
    to_d: NodeClient

    async def prefill(self, prompt: Prompt, tokens: int) -> Prefilled:
        """P's answer to a prompt after which D shall make `tokens` tokens in all."""
        request = request_of(0, prompt, tokens)
        last = GenerateOutput()
        async for output in self.to_p.generate(prefill_request(request), DEADLINES):
            last = output
        if last.kv_transfer_params is None:
            raise RuntimeError("P holds nothing")
        return Prefilled(request, last.kv_transfer_params, monotonic())

    async def pull(self, held: Prefilled) -> GenerateOutput:
        """D's last output of a prompt that P holds; RuntimeError unless D pulled it."""
        request = msgspec.structs.replace(held.request, kv_transfer_params=held.params)
        last = GenerateOutput()
        async for output in self.to_d.generate(request, DEADLINES):
            last = output
        if last.kv_transfer is None or not last.kv_transfer.transfer_ms:
            raise RuntimeError(f"D did not pull the prompt: {last}")
        return last

    @asynccontextmanager
    async def decoding(self, prompts: Sequence[Prompt], tokens: int) -> AsyncIterator[None]:
        """D decodes these prompts of its own inside the block, which must end before they do."""
        started = [asyncio.Event() for _ in prompts]
        tasks = [
            asyncio.create_task(self._decode(request_of(number, prompt, tokens), started[number]))
            for number, prompt in enumerate(prompts)
        ]
        try:
            await asyncio.gather(*(event.wait() for event in started))
            yield
            if any(task.done() for task in tasks):
                raise RuntimeError(f"a request ended early: {tokens} tokens are too few")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _decode(self, request: GenerateRequest, started: asyncio.Event) -> None:
        async for _ in self.to_d.generate(request, DEADLINES):
            started.set()

    async def close(self) -> None:
        """Closes the channels."""
        await self.to_p.close()
        await self.to_d.close()


def node_config(
    model: Path, transport: str, *, arena_bytes: int, pulls: int, caching: bool
) -> NodeConfig:
    """A node as a user starts it, float32, one thread; `pulls` may run at once."""
    extra = {
        "transport": transport,
        "kv_lease_duration": LEASE_S,
        "max_concurrent_pulls": pulls,
    }
    return NodeConfig(
        model=str(model),
        port=0,
        dtype="float32",
        kv_cache_memory_bytes=arena_bytes,
        enable_prefix_caching=caching,
        kv_transfer_config=KVTransferConfig(kv_connector_extra_config=extra),
    )


@contextmanager
def pair(
    loop: asyncio.Runner, model: Path, transport: str, *, p_bytes: int, d_bytes: int, pulls: int
) -> Iterator[Pair]:
    """Both nodes, until the block ends. P may find prompts in its cache, D never does."""
    p_config = node_config(model, transport, arena_bytes=p_bytes, pulls=pulls, caching=True)
    d_config = node_config(model, transport, arena_bytes=d_bytes, pulls=pulls, caching=False)
    with ExitStack() as stack:
        p = stack.enter_context(node_process(p_config, "prefill"))
        d = stack.enter_context(node_process(d_config, "decode"))
        made = loop.run(_connect(p, d))
        stack.callback(lambda: loop.run(made.close()))
        yield made


async def _connect(p: NodeProcess, d: NodeProcess) -> Pair:
    ports = p.grpc_port, d.grpc_port
    to_p, to_d = (NodeClient(f"127.0.0.1:{port}", token=None) for port in ports)
    return Pair(p, d, to_p, to_d)


def blocking(
    loop: asyncio.Runner, call: Callable[[], Coroutine[Any, Any, Result]]
) -> Callable[[], Result]:
    """`call` for a caller without an event loop."""
    return lambda: loop.run(call())
