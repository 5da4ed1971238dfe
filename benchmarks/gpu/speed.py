"""The phase `speed`: a node with a model as large as Qwen3.5-4B, beside the bytes it must read.

First torch's operators, one by one: the zero line. Then the kernels, whose steps are recorded.

    floor of a step     weights once, each sequence's states read and written and its K/V read, at
                        the card's rate of copying
    floor of a prefill  products with weights, and those of attention, at the card's rate of them
    time of a replay    the recorded part of a step, and a product as large as the output head
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.asking import ask, node, prompt_of, request_of
from benchmarks.gpu.checkpoints import published, small
from benchmarks.gpu.sheet import Ceilings, Setting, Sheet
from benchmarks.gpu.steps_watch import StepsWatch
from engine.compute_config import KernelChoice
from engine.families.registry import read_config
from engine.forward import TORCH_DTYPES
from engine.types import SamplingParams
from serving.node.server import NodeServer

NAME = "Qwen3.5-4B"
BATCHES = (1, 8, 32, 64, 128)
CONTEXT = 1_024
PREFILL = 2_048
TOKENS = 48
PROFILED_TOKENS = 16
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
# Layers, heads and channels of the model's attention, whose pairs each take two products.
ATTENTION = 8 * 16 * 256
# Times of the floor that are accepted of a batch, and milliseconds beyond a replay.
OVER_FLOOR = {1: 1.35, 8: 1.35, 32: 1.3, 64: 1.3, 128: 1.3}
HOST_MS = {32: 0.6, 128: 1.0}


@dataclass(slots=True, frozen=True)
class Run:
    """One node, and all that its figures stand beside."""

    sheet: Sheet
    setting: Setting
    ceilings: Ceilings
    watch: StepsWatch
    server: NodeServer
    folder: Path
    kernels: KernelChoice

    @property
    def weights(self) -> int:
        """Bytes of the checkpoint."""
        return sum(file.stat().st_size for file in self.folder.glob("*.safetensors"))

    @property
    def name(self) -> str:
        """Of the column."""
        return "torch" if self.kernels == "torch" else "kernels"

    @property
    def context(self) -> int:
        """Tokens of a sequence before it decodes."""
        return 20 if self.setting.quick else CONTEXT

    def floor(self, batch: int) -> float:
        """Seconds of a step."""
        plan = self.server.engine.core.scheduler.cache.plan
        kept = sum(
            plan.block_bytes(group)
            * (2 if group in plan.state_groups else self.context // plan.block_size_of(group))
            for group in range(len(plan.groups))
        )
        return (self.weights + batch * kept) / self.ceilings.copy

    def prefill_floor(self, length: int) -> float:
        """Seconds of a prompt, without the head, which multiplies one of its rows."""
        config = read_config(self.folder, None)
        size = TORCH_DTYPES[config.dtype].itemsize
        parameters = self.weights / size - config.vocab_size * config.hidden_size
        products = 2 * parameters * length + 4 * ATTENTION * length**2 / 2
        return products / self.ceilings.product


def run(sheet: Sheet, setting: Setting) -> None:
    """Makes the checkpoint, then asks one node of each column."""
    started = perf_counter()
    if setting.quick:
        folder = small("qwen3_5", setting.models)
    else:
        folder = published(NAME, setting.models, setting.device)
    sheet.tell("checkpoint", f"made in {perf_counter() - started:.0f} s")
    ceilings, watch = Ceilings.measure(setting), StepsWatch()
    watch.start()
    columns: tuple[KernelChoice, ...] = ("torch", "auto")
    for kernels in columns:
        make = partial(Run, sheet, setting, ceilings, watch, folder=folder, kernels=kernels)
        with sheet.attempt(f"node, kernels {kernels}"):
            asyncio.run(_measure(make, setting, folder, kernels=kernels))


async def _measure(
    make: Callable[..., Run], setting: Setting, folder: Path, *, kernels: KernelChoice
) -> None:
    started = perf_counter()
    batches = BATCHES[:2] if setting.quick or kernels == "torch" else BATCHES
    async with node(
        folder,
        setting.device,
        dtype="float32" if setting.quick else "bfloat16",
        kernels=kernels,
        max_num_seqs=batches[-1],
        max_num_batched_tokens=64 if setting.quick else PREFILL,
        kv_cache_memory_bytes=(64 << 20) if setting.quick else (24 << 30),
    ) as server:
        bench = make(server=server)
        taken = perf_counter() - started
        bench.sheet.tell(f"{bench.name}: start of the node", f"{taken:.0f} s")
        if bench.watch.recordings or bench.watch.failures:
            figure = f"{bench.watch.recordings}, failed: {bench.watch.failures}"
            bench.sheet.tell(f"{bench.name}: recordings", figure)
        lengths = (40,) if setting.quick else (PREFILL, 8 * PREFILL)
        for length in lengths[:1] if kernels == "torch" else lengths:
            with bench.sheet.attempt(f"{bench.name}: prefill of {length:,}"):
                await _prefill(bench, length)
        for batch in batches:
            with bench.sheet.attempt(f"{bench.name}: decode, batch {batch}"):
                await _decode(bench, batch)
        with bench.sheet.attempt(f"{bench.name}: profile"):
            await _profile(bench)


async def _prefill(bench: Run, length: int) -> None:
    taken = []
    for salt in range(4 if bench.kernels == "torch" else 8):
        started = perf_counter()
        await ask(bench.server.engine, request_of(prompt_of(length, salt), ONE))
        taken.append(perf_counter() - started)
    seconds, floor = median(taken[1:]), bench.prefill_floor(length)
    case = f"{bench.name}: prefill of {length:,} tokens"
    figure = f"{seconds * 1e3:.0f} ms, {length / seconds:,.0f} tokens/s, first {taken[0] * 1e3:.0f}"
    bench.sheet.tell(case, figure)
    if bench.kernels == "auto":
        share = 100 * floor / seconds
        bench.sheet.accept(case, share, "% of products", accept=45, goal=60, at_least=True)


async def _decode(bench: Run, batch: int) -> None:
    bench.watch.reset()
    times = await _follow(bench, batch, 20 if bench.setting.quick else TOKENS)
    # While all decode: after the last one's first token, before the first one's last.
    start, end = max(one[0] for one in times), min(one[-1] for one in times)
    steps = [
        after - before
        for before, after in zip(times[0], times[0][1:], strict=False)
        if before >= start and after <= end
    ]
    step, floor, watch = median(steps), bench.floor(batch), bench.watch
    case = f"{bench.name}: decode, batch {batch}, {bench.context:,} tokens of context"
    bench.sheet.tell(
        case,
        f"{step * 1e3:.2f} ms a token ({min(steps) * 1e3:.2f}-{max(steps) * 1e3:.2f}, {len(steps)}"
        f" steps), {batch / step:,.0f} tokens/s, {step / floor:.2f} times {floor * 1e3:.2f} ms",
    )
    if bench.kernels == "torch":
        return
    figure = f"{watch.steps} steps, {watch.replays} replays, {watch.ahead} ran ahead"
    is_right = min(watch.replays, watch.ahead) >= len(steps)
    bench.sheet.tell(f"{case}: how", figure, "right" if is_right else "wrong")
    if watch.last is not None:
        _replay(bench, batch, step, floor=floor)


def _replay(bench: Run, batch: int, step: float, *, floor: float) -> None:
    """The recorded kernels of the last steps, once more, while no request runs."""
    assert bench.watch.last is not None
    recording, hidden = bench.watch.last
    config = read_config(bench.folder, None)
    shape = config.vocab_size, config.hidden_size
    head = torch.zeros(shape, dtype=hidden.dtype, device=hidden.device)

    def work() -> None:
        recording.replay()
        F.linear(hidden, head).float()

    with torch.inference_mode():
        taken = bench.setting.seconds(work)
    case = f"replay and head, batch {batch}, {bench.context:,} tokens"
    bench.sheet.tell(case, f"{taken * 1e3:.2f} ms, floor {floor * 1e3:.2f} ms")
    bound = OVER_FLOOR[batch]
    bench.sheet.accept(f"{case}, over its floor", taken / floor, "times", accept=bound, goal=1.2)
    if batch in HOST_MS:
        beyond = (step - taken) * 1e3
        bound = HOST_MS[batch]
        bench.sheet.accept(f"a token beyond {case}", beyond, "ms", accept=bound, goal=0.1)


async def _follow(bench: Run, batch: int, tokens: int) -> list[list[float]]:
    """When each token of `batch` requests came."""
    sampling = SamplingParams(max_tokens=tokens + 2 * batch, temperature=0.0, ignore_eos=True)

    async def follow(salt: int) -> list[float]:
        times: list[float] = []
        request = request_of(prompt_of(bench.context, salt), sampling)
        async for output in bench.server.engine.generate(request):
            times += [perf_counter()] * len(output.token_ids)
        return times

    return await asyncio.gather(*(follow(salt) for salt in range(batch)))


async def _profile(bench: Run) -> None:
    """The kernels of decode steps at batch 1, by time; a prefill's are few beside them."""
    await _follow(bench, 1, 2)
    kinds = [ProfilerActivity.CUDA] if bench.setting.on_gpu else [ProfilerActivity.CPU]
    short = request_of(
        prompt_of(1), SamplingParams(max_tokens=PROFILED_TOKENS, temperature=0.0, ignore_eos=True)
    )
    with profile(activities=kinds) as found:
        await ask(bench.server.engine, short)
        bench.setting.synchronize()
    events = [one for one in found.key_averages() if one.self_device_time_total > 0]
    total = sum(one.self_device_time_total for one in events)
    count = sum(one.count for one in events)
    figure = f"{count / PROFILED_TOKENS:,.0f} kernels and {total / PROFILED_TOKENS / 1e3:.2f} ms"
    bench.sheet.tell(
        f"{bench.name}: on the device in a step, batch 1, 16 tokens of context", figure
    )
    for one in sorted(events, key=lambda one: -one.self_device_time_total)[:16]:
        share = one.self_device_time_total / total
        figure = f"{share:.0%}, {one.count / PROFILED_TOKENS:.0f} a step"
        bench.sheet.tell(f"  {one.key[:56]}", figure)
