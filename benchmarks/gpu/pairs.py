"""The phase `pairs`: a prompt handed over between two processes on the device, beside one node.

At batch 1 both do the same work on the same bytes, so tokens and log-probabilities are bit-equal. A
damaged byte is found, and what is read again is right.
"""

import asyncio
import statistics
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import msgspec

from benchmarks.gpu.asking import (
    GREEDY,
    SAMPLED,
    ask,
    config_of,
    hand_over,
    node,
    prompt_of,
    request_of,
)
from benchmarks.gpu.checkpoints import small
from benchmarks.gpu.sheet import Setting, Sheet, gb_per_s
from benchmarks.gpu.tuning import UNTUNED_CONFIGS, save
from benchmarks.hand_over.stamped_node import StampedTransport, Stamps, node_process
from connector.pd.connector import PdConnector
from connector.transports.base import SpanPair, Transfer
from connector.transports.choose import open_transport
from engine.arena import ArenaMemory
from engine.types import GenerateOutput, GenerateRequest
from serving.node.server import NodeServer
from serving.rpc.client import NodeClient, StreamDeadlines

LENGTHS = (17, 64, 200, 700)
LARGE_TOKENS, LARGE_ROUNDS = 7_900, 4


@dataclass(slots=True, frozen=True)
class Far:
    """A node of another process."""

    client: NodeClient

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        """Generates as an engine does."""
        return self.client.generate(request, StreamDeadlines())


Work = Callable[[Far, Far], Coroutine[Any, Any, None]]


def run(sheet: Sheet, setting: Setting) -> None:
    """Pairs of processes, then a pair with damage, then a large prompt."""
    device = setting.device
    ways = [
        ("qwen3_5", "cuda_ipc", device),
        ("qwen3_5", "nixl", device),
        ("nemotron_h", "nixl", device),
        ("qwen3_5", "zmq", device),
        ("qwen3_5", "nixl", "cpu"),
    ]
    with sheet.attempt("damage"):
        asyncio.run(_damage(sheet, setting))
    if setting.on_gpu:
        # Nodes of other processes would tune what this one's have taken, for a minute each.
        save(setting.out / UNTUNED_CONFIGS)
    for family, transport, d_device in ways[3:4] if setting.quick else ways:
        with sheet.attempt(f"{family}, {transport}, {device} to {d_device}"):
            _pair(sheet, setting, family, transport=transport, d_device=d_device)
    for transport in ("cuda_ipc", "nixl", "zmq") if setting.on_gpu else ():
        with sheet.attempt(f"large, {transport}"):
            _large(sheet, setting, transport)


def _pair(sheet: Sheet, setting: Setting, family: str, *, transport: str, d_device: str) -> None:
    folder = small(family, setting.models)
    requests = [
        request_of(prompt_of(n), sampling) for sampling in (GREEDY, SAMPLED) for n in LENGTHS
    ]

    is_one_kind = d_device == setting.device

    async def compare(p: Far, d: Far) -> None:
        equal = near = pulled = 0
        pulls_ms = []
        for request in requests:
            alone = await ask(p, request)
            pair = await hand_over(p, d, request)
            equal += pair.logprobs == alone.logprobs
            near += pair.tokens == alone.tokens
            pulled += pair.last.was_pulled
            if pair.last.kv_transfer is not None:
                pulls_ms.append(pair.last.kv_transfer.transfer_ms)
        figure = f"{equal} of {len(requests)} bit-equal, tokens of {near}, {pulled} pulled"
        is_right = pulled == len(requests) == (equal if is_one_kind else near)
        case = f"{family}, {transport}, {setting.device} to {d_device}"
        sheet.tell(case, figure, "right" if is_right else "wrong")
        if setting.on_gpu and is_one_kind and transport != "zmq":
            # A small model's bytes take no time: what is left is control.
            case += ", pulls of a small model"
            sheet.accept(case, statistics.median(pulls_ms), "ms", accept=5.0, goal=3.0)

    # A GPU and a CPU have torch's operators in common: others make two models of one.
    kernels = "auto" if is_one_kind else "torch"
    _with_nodes(folder, transport, (setting.device, d_device), work=compare, kernels=kernels)


def _large(sheet: Sheet, setting: Setting, transport: str) -> None:
    """Measures a pull of some hundred megabytes, verified."""
    from benchmarks.support.models import WIDE, save_random

    folder = setting.models / WIDE
    if not folder.exists():
        save_random(WIDE, setting.models)

    async def pull(p: Far, d: Far) -> None:
        for number in range(LARGE_ROUNDS):
            one = msgspec.structs.replace(GREEDY, max_tokens=2)
            prompt = prompt_of(LARGE_TOKENS, salt=number)
            started = perf_counter()
            pair = await hand_over(p, d, request_of(prompt, one))
            taken = perf_counter() - started
            stats = pair.last.kv_transfer
            if stats is None or stats.cause:
                sheet.tell(f"large, {transport}", str(stats), "failed")
                continue
            nbytes = stats.attention_bytes + stats.state_bytes
            figure = f"{gb_per_s(nbytes, stats.transfer_ms / 1e3)} of {nbytes / 1e6:.0f} MB, "
            figure += f"verified: {stats.verified}; {taken * 1e3:.0f} ms with both nodes' work"
            sheet.tell(f"{LARGE_TOKENS:,} tokens, {transport}, pull {number}", figure)

    _with_nodes(
        folder,
        transport,
        (setting.device, setting.device),
        work=pull,
        kernels="torch",  # those of the card would be tuned first, and read nothing faster
        kv_cache_memory_bytes=1 << 30,
        max_num_batched_tokens=8192,
    )


def _with_nodes(
    folder: Path, transport: str, devices: Sequence[str], *, work: Work, **changes: object
) -> None:
    """`work` with a client of each of two nodes, each in a process."""
    with ExitStack() as stack:
        ports = []
        for device, kind in zip(devices, ("prefill", "decode"), strict=True):
            config = config_of(folder, device, transport=transport, **changes)
            ports.append(stack.enter_context(node_process(config, kind)).grpc_port)
        asyncio.run(_asked(ports, work))


async def _asked(ports: Sequence[int], work: Work) -> None:
    clients = [NodeClient(f"127.0.0.1:{port}", token=None) for port in ports]
    try:
        await work(*map(Far, clients))
    finally:
        for client in clients:
            await client.close()


class _Damaging(StampedTransport):
    """Another transport, whose reads of blocks arrive with a wrong byte while `times` are left."""

    def __init__(self, inner: Any, times: list[int]) -> None:
        super().__init__(inner, Stamps())
        self._times = times
        self._arena: ArenaMemory | None = None

    def register(self, *regions: ArenaMemory) -> None:
        self._arena = regions[0]
        super().register(*regions)

    def read(self, peer: str, spans: Sequence[SpanPair], region: int = 0) -> Transfer:
        transfer = super().read(peer, spans, region)
        if region == 0 and self._times[0] and self._arena is not None:
            self._times[0] -= 1
            transfer.wait(10.0)
            place = spans[0].local + spans[0].length // 2
            with self._arena.writable(place, 1) as byte:
                byte[0] = self._arena.read(place, 1)[0] ^ 1
        return transfer


async def _damage(sheet: Sheet, setting: Setting) -> None:
    """One read is damaged, and read again; then two in a row, and D computes the prompt."""
    folder, times = small("qwen3_5", setting.models), [0]

    def opened(*args: Any, **kwargs: Any) -> _Damaging:
        return _Damaging(open_transport(*args, **kwargs), times)

    builder_of = partial(PdConnector.builder, open_transport=opened)

    start = partial(node, folder, setting.device, transport="zmq")
    async with start(kind="prefill") as p, start(kind="decode", build=builder_of) as d:
        for count, should_pull in ((1, True), (2, False)):
            request = request_of(prompt_of(200, salt=count), GREEDY)
            alone = await ask(p.engine, request)
            times[0] = count
            pair = await hand_over(p.engine, d.engine, request)
            found = _counted(d)
            is_right = pair.logprobs == alone.logprobs and pair.last.was_pulled == should_pull
            figure = f"bit-equal: {pair.logprobs == alone.logprobs}, pulled: "
            figure += f"{pair.last.was_pulled}, {found:.0f} reads again so far"
            is_right &= found == count
            case = f"{count} damaged reads on {setting.device}"
            sheet.tell(case, figure, "right" if is_right else "wrong")


def _counted(server: NodeServer) -> float:
    """The number of pulls that found blocks that differ."""
    return sum(
        sample.value
        for family in server.metrics.registry.collect()
        for sample in family.samples
        if sample.name == "tandem:kv_verification_retries_total"
    )
