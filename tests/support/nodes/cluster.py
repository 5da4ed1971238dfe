"""Small random checkpoints of every family, and nodes that must give everything back."""

import asyncio
import gc
import json
import shutil
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import msgspec
import pytest
import torch
import transformers
import zmq

from benchmarks.support.small_models import configs, widen
from connector.pd.decode.pull_reader import STAGE_BYTES
from connector.registry import builder_of
from engine.types import GenerateOutput, GenerateRequest, PromptLogprobs, TokenLogprob
from serving.config import KVTransferConfig, NodeConfig
from serving.node.connector import BuilderOf
from serving.node.server import NodeServer
from tests.support.api.api_double import write_model_folder
from tests.support.cache.recount import check_scheduler
from tests.support.faults.fault_points import NO_FAULTS, FaultInjector, faulty_builder
from tests.support.nodes.engine_thread import run_in_engine
from tests.support.nodes.forks import forks
from tests.support.nodes.leaks import Holdings, excess, held_here, running_tasks
from tests.support.nodes.processes import SETTLE_S

Sample = tuple[str, frozenset[tuple[str, str]]]

CONTEXT = 400


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A random fp32 checkpoint folder per family, with a tokenizer and a chat template."""
    folders = {}
    for name, config in configs(CONTEXT).items():
        folder = tmp_path_factory.mktemp(name)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        widen(model, seed=7).save_pretrained(folder)
        folders[name] = write_model_folder(folder)
    return folders


@pytest.fixture(scope="session")
def model(checkpoints: dict[str, Path]) -> Path:
    """The checkpoint of tests that need any hybrid: attention and gated delta net layers."""
    return checkpoints["qwen3_5"]


def with_context(model: Path, folder: Path, context: int) -> Path:
    """A copy of a checkpoint in a new `folder` that promises `context` positions."""
    shutil.copytree(model, folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = context
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(slots=True)
class Generation:
    """All that one request produced."""

    token_ids: list[int]
    logprobs: list[TokenLogprob]
    last: GenerateOutput
    prompt_logprobs: PromptLogprobs | None = None


class Engine(Protocol):
    """An engine of this process or of another host."""

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]: ...


class Node(Protocol):
    """A node of this process or of another host."""

    @property
    def engine(self) -> Engine: ...


async def generate(node: Node, request: GenerateRequest) -> Generation:
    """Runs one request on one node, to its end."""
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    last = GenerateOutput()
    async with asyncio.timeout(60):
        async for output in node.engine.generate(request):
            token_ids += output.token_ids
            logprobs += output.logprobs or ()
            last = output
    return Generation(token_ids, logprobs, last)


@dataclass(slots=True)
class Cluster:
    """Makes nodes with equal settings and closes them."""

    nodes: list[NodeServer]

    async def start(
        self,
        kind: str,
        model: Path,
        *,
        faults: FaultInjector = NO_FAULTS,
        stage_bytes: int = STAGE_BYTES,
        **changes: object,
    ) -> NodeServer:
        """One more node; `changes` are NodeConfig fields."""
        build = builder_of
        if faults is not NO_FAULTS or stage_bytes != STAGE_BYTES:
            build = partial(faulty_builder, faults=faults, stage_bytes=stage_bytes)
        return await self.start_with(build, kind, model, **changes)

    async def start_with(
        self, build: BuilderOf, kind: str, model: Path, **changes: object
    ) -> NodeServer:
        """One more node, whose connector is built by `build`."""
        config = msgspec.structs.replace(BASE, model=str(model), **changes)
        node = NodeServer(config, kind, build)
        await node.start()
        self.nodes.append(node)
        return node

    async def pair(
        self,
        model: Path,
        config: KVTransferConfig | None = None,
        *,
        on_p: FaultInjector = NO_FAULTS,
        on_d: FaultInjector = NO_FAULTS,
        d: Mapping[str, Any] = MappingProxyType({}),
        **both: Any,
    ) -> tuple[NodeServer, NodeServer]:
        """A prefill and a decode node; `both` is what `start` takes for either, `d` for D alone."""
        if config is not None:
            both["kv_transfer_config"] = config
        p = await self.start("prefill", model, faults=on_p, **both)
        return p, await self.start("decode", model, faults=on_d, **{**both, **d})


BASE = NodeConfig(
    model="",
    port=0,
    kv_cache_memory_bytes=16 << 20,
    max_num_batched_tokens=64,
    enable_prefix_caching=False,
    enable_prompt_tokens_details=True,
)


def transfer_config(
    transport: str = "shm",
    policy: str = "recompute",
    lease_s: float = 30.0,
    control_s: float = 2.0,
    verify: bool = True,
) -> KVTransferConfig:
    """A kv_transfer_config for tests."""
    extra = {
        "transport": transport,
        "kv_lease_duration": lease_s,
        "control_timeout": control_s,
        "verify_transfers": verify,
    }
    fields = {"kv_load_failure_policy": policy, "kv_connector_extra_config": extra}
    return msgspec.convert(fields, KVTransferConfig)


_COUNTED_FROM: WeakKeyDictionary[NodeServer, dict[Sample, float]] = WeakKeyDictionary()


def count_from_here(node: NodeServer) -> None:
    """Counters of this node are zero now, for `sample` and all that uses it."""
    _COUNTED_FROM[node] = {
        (one.name, frozenset(one.labels.items())): one.value
        for family in node.metrics.registry.collect()
        for one in family.samples
        if family.type in ("counter", "histogram")
    }


def sample(node: NodeServer, name: str, **labels: str) -> float:
    """One number as Prometheus would read it now."""
    found = sample_or_none(node, name, **labels)
    assert found is not None, name
    return found


def sample_or_none(node: NodeServer, name: str, **labels: str) -> float | None:
    """None where nothing was counted yet."""
    every = {**node.metrics.labels, **labels}
    found = node.metrics.registry.get_sample_value(name, every)
    start = _COUNTED_FROM.get(node, {}).get((name, frozenset(every.items())), 0.0)
    return None if found is None else found - start


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what other threads do."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - no event tells
            await asyncio.sleep(0.01)


async def settled(node: NodeServer) -> None:
    """Waits until a node holds nothing, and asserts it."""
    scheduler = node.engine.core.scheduler
    for _ in range(500):
        if scheduler.cache.usage == 0:
            break
        await asyncio.sleep(0.02)
    held, loading = list(scheduler.holds), list(scheduler.loads)
    assert not (held or loading or scheduler.num_running), (node.kind, held, loading)
    assert scheduler.cache.usage == 0
    await run_in_engine(node.engine, partial(check_scheduler, scheduler))
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_held) == (0, 0, 0)


@pytest.fixture(scope="session")
def warm(checkpoints: dict[str, Path]) -> None:
    """One node's life ahead of all accounts: libraries open what they keep for good."""
    forks()

    async def live_once() -> None:
        made = Cluster([])
        await made.start(
            "prefill", checkpoints["qwen3"], kv_transfer_config=transfer_config("nixl")
        )
        await close_all(made.nodes)

    asyncio.run(live_once())
    zmq.Frame(bytes(1 << 17), copy=False)  # starts the thread that lets buffers go for pyzmq
    gc.collect()
    gc.freeze()  # the modules imported so far: accounts collect garbage, and must be quick


async def all_back(before: Holdings) -> None:
    """Asserts that this process holds no more than before."""
    # By the clock: each look collects garbage, which takes longer than the sleep.
    deadline = time.monotonic() + SETTLE_S
    while (more := excess(before, held_here())) and time.monotonic() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    if not more:
        return
    raise AssertionError(f"still held: {more} {running_tasks() if more['task'] else ''}")


async def close_all(nodes: list[NodeServer]) -> None:
    """Every living node must be empty before the first is closed; all are closed, come what may."""
    try:
        for node in nodes:
            if node.engine.is_alive:
                await settled(node)
    finally:
        ends = await asyncio.gather(*(node.close() for node in nodes), return_exceptions=True)
    for end in ends:
        if end is not None:
            raise end


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As nodes do."""
    torch.set_num_threads(1)
    yield
