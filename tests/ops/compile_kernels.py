"""Compiles the operators' Triton kernels for an H200 where there is none: nothing is launched.

The interpreter takes Python that the compiler refuses, such as a variable that changes its type in
a loop. `python -m tests.ops.compile_kernels [CASE...]` prints each kernel's shared memory in bytes;
it must run without TRITON_INTERPRET.
"""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from engine.forward import AttentionCache, AttentionIndex, SequenceLens
from engine.model_configs.feed_forward import Activation
from engine.model_configs.recurrent import Gating
from engine.ops.backend import Ops, cuda_ops
from engine.ops.copy_spans.cuda import copy_spans
from engine.ops.digest.cuda import block_digests

SHARED_BYTES = 227 * 1024
"""Of one program on an H200 at most."""
DTYPE = torch.bfloat16


class AbsentDevice:
    """Answers the questions that Triton asks its driver before a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)


def compile_launches() -> None:
    """From now on a launch compiles its kernel, and no more."""
    driver.set_active(AbsentDevice())
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> Any:
        kernel = run(self, *args, **{**kwargs, "warmup": True})
        shared = kernel.metadata.shared
        print(f"{self.fn.__name__} {shared}", flush=True)
        assert shared <= SHARED_BYTES
        return kernel

    JITFunction.run = compile_only


def attention(ops: Ops, heads: int, kv_heads: int, dim: int, *, window: int | None = None) -> None:
    """Decodes and a segment; one kv head has latents."""
    latent = kv_heads == 1
    pages = torch.zeros(9, kv_heads, 16, dim, dtype=DTYPE)
    values = pages if latent else pages.clone()
    cache = AttentionCache(pages, values, pages.view(-1, dim), values.view(-1, dim))
    index = AttentionIndex(
        torch.zeros(2, 8, dtype=torch.int64),
        torch.zeros(4 * kv_heads, dtype=torch.int64),
        torch.zeros(4, dtype=torch.int64),
        SequenceLens(1, [1, 3], [4, 5]),
    )
    q, k = (torch.zeros(4, count, dim, dtype=DTYPE) for count in (heads, kv_heads))
    v = None if latent else k.clone()
    ops.paged_attention(q, k, v, cache, index, scale=1.0, window=window)


def small(ops: Ops) -> None:
    """All but attention."""
    x = torch.zeros(32, 2560, dtype=DTYPE)
    ops.norm(torch.ones(2560), 1e-6, DTYPE)(x, x)
    ops.norm(torch.ones(20, 128), 1e-6, DTYPE)(x.view(32, 20, 128))
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


def spans(ops: Ops) -> None:
    """Digests of blocks, of which one is brought together first; copies of each width."""
    content = torch.zeros(4096, dtype=torch.uint8)
    block_digests(content, [[(0, 2000)], [(8, 200), (1, 300)]], lambda *_: memoryview(b""))
    for width in (8, 4, 2, 1):
        copy_spans(content, content.clone(), np.array([[width, 2 * width, 3 * width]], np.int64))


CASES: dict[str, Callable[[Ops], None]] = {
    "small": small,
    "spans": spans,
    "attention": lambda ops: attention(ops, 16, 4, 256),
    "window": lambda ops: attention(ops, 6, 2, 80, window=512),
    "latent": lambda ops: attention(ops, 32, 1, 576),
}


def main(names: list[str]) -> None:
    """These cases, or all, by a device's own path through the operators."""
    compile_launches()
    ops = cuda_ops()
    for name in names or CASES:
        CASES[name](ops)


if __name__ == "__main__":
    main(sys.argv[1:])
