"""Compiles the operators' Triton kernels for an H200 where there is none: nothing is launched.

The interpreter takes Python that the compiler refuses, such as a variable that changes its type in
a loop. `python -m tests.ops.compile_kernels [CASE...]` prints each kernel's shared memory in bytes;
it must run without TRITON_INTERPRET. Of kernels that are tuned where they run, fla's, the first
configuration that fits is compiled.
"""

import sys
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from engine.forward import (
    AttentionCache,
    AttentionIndex,
    SequenceLens,
    StateExport,
    StateIndex,
)
from engine.model_configs.feed_forward import Activation
from engine.model_configs.recurrent import Gating
from engine.ops.backend import Ops, cuda_ops
from engine.ops.copy_spans.cuda import copy_spans
from engine.ops.digest.cuda import block_digests
from engine.ops.gated_delta_rule.parameters import DeltaRuleParameters
from engine.ops.ssd.parameters import SSDParameters

SHARED_BYTES = 227 * 1024
"""Of one program on an H200 at most."""


class TooLarge(Exception):
    """A program that needs more shared memory than there is."""


class AbsentDevice:
    """Answers the questions that Triton and fla ask before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_capability(self, device: object = None) -> tuple[int, int]:
        return 9, 0

    def get_device_name(self, device: object = None) -> str:
        return "NVIDIA H200"


def compile_launches() -> None:
    """From now on a launch compiles its kernel, and no more."""
    device = AbsentDevice()
    driver.set_active(device)
    torch.cuda.current_device = device.get_current_device
    torch.cuda.get_device_capability = device.get_device_capability
    torch.cuda.get_device_name = device.get_device_name
    torch.cuda.device = nullcontext  # type: ignore[assignment,misc]
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        shared = kernel.metadata.shared
        print(f"{self.fn.__module__} {self.fn.__name__} {shared}", flush=True)
        if shared > SHARED_BYTES:
            raise TooLarge(self.fn.__name__)
        return kernel

    def take_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        # As a tuner does, which leaves out those that the device refuses.
        for config in self.configs:
            with suppress(TooLarge):
                return self.fn.run(*args, **kwargs, **config.all_kwargs())
        raise TooLarge(f"each configuration of {self.fn}")

    JITFunction.run = compile_only
    Autotuner.run = take_first


def attention(
    ops: Ops,
    dtype: torch.dtype,
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None = None,
) -> None:
    """Decodes and a segment; one kv head has latents."""
    latent = kv_heads == 1
    pages = torch.zeros(9, kv_heads, 16, dim, dtype=dtype)
    values = pages if latent else pages.clone()
    cache = AttentionCache(pages, values, pages.view(-1, dim), values.view(-1, dim))
    index = AttentionIndex(
        torch.zeros(2, 8, dtype=torch.int64),
        torch.zeros(4 * kv_heads, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
        SequenceLens(1, [1, 3], [4, 5]),
    )
    q, k = (torch.zeros(4, count, dim, dtype=dtype) for count in (heads, kv_heads))
    v = None if latent else k.clone()
    ops.paged_attention(q, k, v, cache, index, scale=1.0, window=window)


def small(ops: Ops, dtype: torch.dtype) -> None:
    """All that knows neither pages nor states."""
    x = torch.zeros(32, 2560, dtype=dtype)
    ops.norm(torch.ones(2560), 1e-6, dtype)(x, x)
    ops.norm(torch.ones(20, 128), 1e-6, dtype)(x.view(32, 20, 128))
    for gating in Gating:
        weight = None if gating is Gating.GATE_ONLY else torch.ones(128)
        ops.gated_norm(weight, 1e-6, gating=gating)(x.float(), x)
    for kind in Activation:
        ops.activation(kind, gated=True)(x)
        ops.activation(kind, gated=False)(x)
    ops.gate(x, x[:, :1], x)
    ops.gate(x, x, sigmoid=False)
    ops.rotate_(x.view(32, 20, 128), torch.zeros(2, 32, 1, 64))
    ops.lookup(x, torch.zeros(3, dtype=torch.int64), torch.float32, scale=2.0)


def spans(_: Ops, __: torch.dtype) -> None:
    """Digests of blocks, of which one is brought together first; copies of each width."""
    content = torch.zeros(4096, dtype=torch.uint8)
    block_digests(content, [[(0, 2000)], [(8, 200), (1, 300)]], lambda *_: memoryview(b""))
    for width in (8, 4, 2, 1):
        copy_spans(content, content.clone(), np.array([[width, 2 * width, 3 * width]], np.int64))


# Decodes, of which one is padding; a segment with an export, and one of less than a chunk.
LENS = [1, 1, 1, 130, 5]
TOKENS = sum(LENS)
INDEX = StateIndex(
    torch.tensor([1, 2, -1, 3, 4]), None, SequenceLens(3, LENS, [0] * 5), (StateExport(0, 66, 5),)
)


def rows(dtype: torch.dtype, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Slices of one wide product, as layers have them."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    wide = torch.zeros(TOKENS, sum(sizes), dtype=dtype)
    parts = wide.split_with_sizes(sizes, dim=1)
    return [part.view(TOKENS, *shape) for part, shape in zip(parts, shapes, strict=True)]


def convolution(ops: Ops, dtype: torch.dtype) -> None:
    """Qwen3.5-4B's, and one with a bias."""
    channels = 8192
    x, _ = rows(dtype, (channels,), (64,))
    pool, weight = (torch.zeros(*shape, channels, dtype=dtype) for shape in ((8, 3), (4,)))
    ops.causal_conv1d(x, pool, INDEX, weight, None)
    ops.causal_conv1d(x, pool, INDEX, weight, weight[0], silu=False)


def delta_rule(
    ops: Ops, dtype: torch.dtype, *, keys: int, heads: int, by_channel: bool = False
) -> None:
    """Heads of 128, as in Qwen3.5-4B and Kimi Linear."""
    decays = (heads, 128) if by_channel else (heads,)
    q, k, v, a, b = rows(dtype, (keys, 128), (keys, 128), (heads, 128), decays, (heads,))
    pool = torch.zeros(8, heads, 128, 128)
    parameters = DeltaRuleParameters(rate=-torch.ones(heads), dt_bias=torch.ones(decays))
    ops.gated_delta_rule(q, k, v, a, b, pool, INDEX, parameters=parameters)


def duality(
    ops: Ops, dtype: torch.dtype, *, heads: int, groups: int, dim: int, size: int, plain: bool
) -> None:
    """Mamba2, or `plain` lightning attention, whose steps are all one."""
    x, dt, b, c = rows(dtype, (heads, dim), (heads,), (groups, size), (groups, size))
    ones = torch.ones(heads)
    parameters = SSDParameters(a=-ones) if plain else SSDParameters(a=-ones, dt_bias=ones, d=ones)
    pool = torch.zeros(8, heads, dim, size)
    ops.ssd(x, None if plain else dt, b, c, pool, INDEX, parameters=parameters)


def scan(ops: Ops, dtype: torch.dtype) -> None:
    """Jamba's."""
    channels, size = 8192, 16
    x, b, c = rows(dtype, (channels,), (size,), (size,))
    dt, a = torch.ones(TOKENS, channels), -torch.ones(size, channels)
    ops.selective_scan(x, dt, a, b, c, torch.zeros(8, size, channels), INDEX)


def experts(ops: Ops, dtype: torch.dtype) -> None:
    """Few tokens, some and many, which have tiles of their own."""
    count, top_k, width, inner = 4, 2, 2048, 768
    up = torch.zeros(count, 2 * inner, width, dtype=dtype)
    down = torch.zeros(count, width, inner, dtype=dtype)
    for kind, gated in ((Activation.SILU, True), (Activation.RELU2, False)):
        run = ops.experts(up if gated else up[:, :inner], down, activation=kind, gated=gated)
        for tokens in (3, 200, 2048):
            x = torch.zeros(tokens, width, dtype=dtype)
            chosen = torch.zeros(tokens, top_k, dtype=torch.int64)
            run(x, chosen, torch.ones(tokens, top_k), x if gated else None)


DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
OPERATORS: dict[str, Callable[[Ops, torch.dtype], None]] = {
    "small": small,
    "spans": spans,
    "attention": partial(attention, heads=16, kv_heads=4, dim=256),
    "window": partial(attention, heads=6, kv_heads=2, dim=80, window=512),
    "latent": partial(attention, heads=32, kv_heads=1, dim=576),
    "convolution": convolution,
    "delta-rule": partial(delta_rule, keys=16, heads=32),
    "delta-rule-by-channel": partial(delta_rule, keys=32, heads=32, by_channel=True),
    "mamba2": partial(duality, heads=128, groups=8, dim=64, size=128, plain=False),
    "mamba2-wide": partial(duality, heads=32, groups=1, dim=64, size=256, plain=False),
    "lightning": partial(duality, heads=64, groups=64, dim=128, size=128, plain=True),
    "scan": scan,
    "experts": experts,
}
CASES = tuple(f"{name},{dtype}" for name in OPERATORS for dtype in DTYPES)


def main(cases: list[str]) -> None:
    """These cases, or all, by a device's own path through the operators."""
    compile_launches()
    ops = cuda_ops()
    for case in cases or CASES:
        name, dtype = case.split(",")
        OPERATORS[name](ops, DTYPES[dtype])


if __name__ == "__main__":
    main(sys.argv[1:])
