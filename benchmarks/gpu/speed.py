"""The phase `speed`: a node with a model as large as Qwen3.5-4B, beside the bytes it must read.

The floor of a step: weights once, and each sequence's states read and written and its K/V read, at
the card's rate of copying.
"""

import asyncio
from pathlib import Path
from statistics import median
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.asking import ask, node, prompt_of, request_of
from benchmarks.gpu.checkpoints import published
from benchmarks.gpu.sheet import Setting, Sheet
from engine.types import SamplingParams
from serving.node.server import NodeServer

NAME = "Qwen3.5-4B"
BATCHES = (1, 8, 32)
CONTEXT = 1_024
PREFILL = 2_048
TOKENS = 48
PROFILED_TOKENS = 16
ONE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)


def run(sheet: Sheet, setting: Setting) -> None:
    """Makes the checkpoint, then asks one node."""
    started = perf_counter()
    layers = 4 if setting.quick else None
    folder = published(NAME, setting.models, setting.device, num_layers=layers)
    nbytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    made = perf_counter() - started
    sheet.tell("checkpoint", f"{nbytes / 1e9:.2f} GB in {made:.0f} s")
    asyncio.run(_measure(sheet, setting, folder, weights=nbytes))


async def _measure(sheet: Sheet, setting: Setting, folder: Path, *, weights: int) -> None:
    rate = _copy_rate(setting)
    started = perf_counter()
    async with node(
        folder,
        setting.device,
        dtype="bfloat16",
        max_num_batched_tokens=PREFILL,
        kv_cache_memory_bytes=(1 << 30) if setting.quick else (16 << 30),
    ) as server:
        sheet.tell("start of the node", f"{perf_counter() - started:.0f} s")
        for length in (PREFILL,) if setting.quick else (PREFILL, 8 * PREFILL):
            with sheet.attempt(f"prefill of {length:,}"):
                await _prefill(sheet, server, length)
        for batch in BATCHES[:1] if setting.quick else BATCHES:
            with sheet.attempt(f"decode, batch {batch}"):
                await _decode(sheet, server, batch, weights=weights, rate=rate)
        with sheet.attempt("profile"):
            await _profile(sheet, setting, server)


def _copy_rate(setting: Setting) -> float:
    source = torch.empty(
        64 << 20 if setting.quick else 2 << 30, dtype=torch.uint8, device=setting.device
    )
    target = torch.empty_like(source)
    return 2 * source.nbytes / setting.seconds(lambda: target.copy_(source))


async def _prefill(sheet: Sheet, server: NodeServer, length: int) -> None:
    taken = []
    for salt in range(4):
        started = perf_counter()
        await ask(server.engine, request_of(prompt_of(length, salt), ONE))
        taken.append(perf_counter() - started)
    seconds = median(taken[1:])
    figure = f"{seconds * 1e3:.0f} ms, {length / seconds:,.0f} tokens/s, first {taken[0] * 1e3:.0f}"
    sheet.tell(f"prefill of {length:,} tokens", figure)


async def _decode(
    sheet: Sheet, server: NodeServer, batch: int, *, weights: int, rate: float
) -> None:
    times = await _follow(server, batch, TOKENS)
    # While all decode: after the last one's first token, before the first one's last.
    start, end = max(one[0] for one in times), min(one[-1] for one in times)
    steps = [
        after - before
        for before, after in zip(times[0], times[0][1:], strict=False)
        if before >= start and after <= end
    ]
    step = median(steps)
    plan = server.engine.core.scheduler.cache.plan
    kept = sum(
        plan.block_bytes(group)
        * (2 if group in plan.state_groups else CONTEXT // plan.block_size_of(group))
        for group in range(len(plan.groups))
    )
    floor = (weights + batch * kept) / rate
    sheet.tell(
        f"decode, batch {batch}, {CONTEXT:,} tokens of context",
        f"{step * 1e3:.2f} ms a token ({min(steps) * 1e3:.2f}-{max(steps) * 1e3:.2f}, {len(steps)}"
        f" steps), {batch / step:,.0f} tokens/s, {step / floor:.1f} times {floor * 1e3:.2f} ms",
    )


async def _follow(server: NodeServer, batch: int, tokens: int) -> list[list[float]]:
    """When each token of `batch` requests came."""
    sampling = SamplingParams(max_tokens=tokens + 2 * batch, temperature=0.0, ignore_eos=True)

    async def follow(salt: int) -> list[float]:
        times: list[float] = []
        async for output in server.engine.generate(request_of(prompt_of(CONTEXT, salt), sampling)):
            times += [perf_counter()] * len(output.token_ids)
        return times

    return await asyncio.gather(*(follow(salt) for salt in range(batch)))


async def _profile(sheet: Sheet, setting: Setting, server: NodeServer) -> None:
    """The kernels of decode steps at batch 1, by time; a prefill's are few beside them."""
    await _follow(server, 1, 2)
    kinds = [ProfilerActivity.CUDA] if setting.on_gpu else [ProfilerActivity.CPU]
    short = request_of(
        prompt_of(1), SamplingParams(max_tokens=PROFILED_TOKENS, temperature=0.0, ignore_eos=True)
    )
    with profile(activities=kinds) as found:
        await ask(server.engine, short)
        setting.synchronize()
    events = [one for one in found.key_averages() if one.self_device_time_total > 0]
    total = sum(one.self_device_time_total for one in events)
    count = sum(one.count for one in events)
    figure = f"{count / PROFILED_TOKENS:,.0f} kernels and {total / PROFILED_TOKENS / 1e3:.2f} ms"
    sheet.tell("on the device in a step, batch 1, 16 tokens of context", figure)
    for one in sorted(events, key=lambda one: -one.self_device_time_total)[:12]:
        share = one.self_device_time_total / total
        figure = f"{share:.0%}, {one.count / PROFILED_TOKENS:.0f} a step"
        sheet.tell(f"  {one.key[:56]}", figure)
