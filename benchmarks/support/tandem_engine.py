"""Whole engines inside the benchmark's process: a node behind its asyncio front, or the bare core.

Knows nothing of what they are compared with.
"""

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from threading import Event
from time import perf_counter
from types import MappingProxyType
from typing import Self

import msgspec
import torch

from connector.registry import builder_of
from engine.arena import ArenaMemory
from engine.core import EngineCore
from engine.families.registry import read_config
from engine.kv_cache.arena_plan import plan_arena
from engine.kv_cache.manager import KVCacheManager
from engine.kv_connector import Connector, LocalAdmission, SchedulerConnector, WorkerConnector
from engine.model_configs.identity import ModelIdentity
from engine.models.loader import load_model
from engine.request import Request
from engine.sched.scheduler import Scheduler
from engine.types import GenerateRequest, SamplingParams
from engine.worker.model_runner import ModelRunner
from serving.config import NodeConfig, load_config
from serving.metrics import NodeMetrics
from serving.node.connector import Build, NodeConnector, NodeParts
from serving.node.kv_events import NodeEvents
from serving.node.limits import scheduler_config
from serving.node.server import NodeServer

ARENA_BYTES = 128 << 20
WAIT_S = 0.2


class Timing(msgspec.Struct, frozen=True):
    """One batch: seconds until all had a first token, and the tokens and seconds after that."""

    first_s: float
    decode_tokens: int
    decode_s: float

    @classmethod
    def of(cls, started: float, arrivals: Sequence[Sequence[float]]) -> Self:
        """From the times at which each sequence's tokens came."""
        all_started = max(times[0] for times in arrivals)
        end = max(times[-1] for times in arrivals)
        later = sum(time > all_started for times in arrivals for time in times)
        return cls(all_started - started, later, end - all_started)


def request_of(number: int, prompt: Sequence[int], tokens: int) -> GenerateRequest:
    """Greedy, exactly `tokens` tokens."""
    sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return GenerateRequest(
        request_id=f"bench-{number}", prompt_token_ids=tuple(prompt), sampling=sampling
    )


class TandemNode:
    """A decode node with all its threads and servers; `generate` blocks until the batch is done.

    `options`: further ones of the node, as its config names them.
    """

    def __init__(self, folder: Path, options: Mapping[str, object] = MappingProxyType({})) -> None:
        fixed = {
            "model": str(folder),
            "port": 0,
            "kv_cache_memory_bytes": ARENA_BYTES,
            "enable_prefix_caching": False,  # rounds repeat their prompts; each is computed anew
        }
        config = load_config(NodeConfig, None, {**fixed, **options})
        self._loop = asyncio.Runner()
        self._node = NodeServer(config, "decode", builder_of)
        self._loop.run(self._node.start())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._node.close())
        self._loop.close()

    def generate(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        """`tokens` greedy tokens after every prompt, all prompts at once."""
        return self._loop.run(self._batch(prompts, tokens))

    async def _batch(self, prompts: Sequence[Sequence[int]], tokens: int) -> Timing:
        requests = [request_of(number, prompt, tokens) for number, prompt in enumerate(prompts)]
        started = perf_counter()
        arrivals = await asyncio.gather(*(self._follow(request) for request in requests))
        return Timing.of(started, arrivals)

    async def _follow(self, request: GenerateRequest) -> list[float]:
        times: list[float] = []
        async for output in self._node.engine.generate(request):
            times += [perf_counter()] * len(output.token_ids)
        return times


def state_bytes(folder: Path, dtype: str) -> int:
    """Bytes of one sequence's states in all layers."""
    return plan_arena(read_config(folder, dtype).groups, 16, ARENA_BYTES).state_bytes


class BareCore:
    """Scheduler, KV cache and runner: `core.step()` is all that runs, beside a connector's threads.

    `woken`: set when such a thread has news for the next step.
    """

    def __init__(self, folder: Path, options: NodeConfig, build: Build | None = None) -> None:
        config = read_config(folder, options.dtype)
        self.plan = plan = plan_arena(config.groups, 16, options.kv_cache_memory_bytes)
        publishes = options.kv_events_config.is_published
        self.events = NodeEvents(options, plan, "bench", host=options.host) if publishes else None
        self._arena = ArenaMemory(plan.arena_bytes)
        self._resources = AsyncExitStack()
        self.woken = Event()
        self.connector = Connector(LocalAdmission(), SchedulerConnector(), WorkerConnector())
        self.node_connector: NodeConnector | None = None
        if build is not None:
            self.node_connector = self._connect(options, build, vocab_size=config.vocab_size)
            self.connector = self.node_connector.connector
        cache = KVCacheManager(
            plan,
            prefix_caching=options.enable_prefix_caching,
            listener=self.events.recorder
            if self.events
            else self.connector.scheduler.cache_listener,
        )
        self.scheduler = Scheduler(scheduler_config(options), cache, self.connector.scheduler)
        model = load_model(folder, config, torch.device("cpu"), compute=options.compute)
        self.runner = ModelRunner(model, plan, self._arena)
        after_step = self.events.publish if self.events else None
        self.core = EngineCore(self.scheduler, self.runner, self.connector, after_step=after_step)

    def run(self) -> None:
        """Steps until no request is left, and waits for the connector where one needs it."""
        while self.scheduler.has_work or self.scheduler.loads:
            self.woken.clear()
            _, again = self.core.step()
            if not again:
                self.woken.wait(WAIT_S)

    def add(self, origin: GenerateRequest) -> None:
        """Puts a request into the queue."""
        request = Request.from_generate(
            origin,
            self.scheduler.cache.hasher,
            max_model_len=len(origin.prompt_token_ids) + origin.sampling.max_tokens,
            eos_token_ids=frozenset(),
        )
        self.scheduler.add(request)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.core.close()
        asyncio.run(self._resources.aclose())
        if self.events is not None:
            self.events.close()
        self._arena.close()

    def _connect(self, options: NodeConfig, build: Build, *, vocab_size: int) -> NodeConnector:
        parts = NodeParts(
            self.plan,
            self._arena,
            NodeMetrics("bench", "bench"),
            wake=self.woken.set,
            resources=self._resources,
            engine_id="bench",
            host=options.host,
            cluster_token=None,
            tls=None,
            identity=lambda: ModelIdentity({}),
            vocab_size=vocab_size,
            max_model_len=self.plan.longest_sequence(1 << 40),
            prefix_hash_seed="",
        )
        return build(parts)
