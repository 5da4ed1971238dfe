"""The machine behind the figures: core, threads, load, and the speed of memory."""

import os
import platform
from collections.abc import Callable
from time import perf_counter

import msgspec
import torch

STREAM_ROUNDS = 10
GEMM_ROUNDS = 10
# Rows, and both sides of the square matrix: near the size of a prompt and of a model's layers.
GEMM_ROWS, GEMM_SIDE = 2048, 1024
# The row count that oneDNN packs the matrix for.
PACK_HINT = 64


class Machine(msgspec.Struct, frozen=True):
    """The machine of one run; `load` is the one-minute average when it started."""

    cpu: str
    cores: int
    pinned_to: str
    threads: int
    torch: str
    load: float


def prepare(cpu: str, threads: int = 1) -> Machine:
    """Sets torch's threads; keeps this process and its children on cores `cpu` (`0,1`, `all`)."""
    torch.set_num_threads(threads)
    load = os.getloadavg()[0]
    cores = os.cpu_count() or 1
    if cpu != "all":
        os.sched_setaffinity(0, {int(core) for core in cpu.split(",")})
    return Machine(_cpu_name(), cores, cpu, torch.get_num_threads(), str(torch.__version__), load)


def use_onednn_matmul() -> None:
    """Plain float32 products through oneDNN instead of MKL: faster on AMD.

    On a CPU with AMX it would round to bfloat16.
    """
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"  # type: ignore[attr-defined]


def describe(host: Machine) -> str:
    """The conditions of a run in one line."""
    cores = (
        f"core{'s' if ',' in host.pinned_to else ''} {host.pinned_to} of {host.cores}"
        if host.pinned_to != "all"
        else f"{host.cores} cores"
    )
    plural = "s" if host.threads > 1 else ""
    software = f"{host.threads} torch thread{plural}, torch {host.torch}"
    return f"{host.cpu}, {cores}, {software}, load {host.load:.1f}"


def read_bandwidth(nbytes: int) -> float:
    """Bytes per second at which torch reads `nbytes` again and again: the best of two kernels.

    The size matters: weights that fit a cache stream from there, in the benchmark as in the model.
    """
    rows = torch.ones(nbytes // 4096, 1024)
    vector = torch.ones(1024)
    kernels = (rows.sum, lambda: torch.mv(rows, vector))
    return max(_best_rate(kernel, rows.nbytes, STREAM_ROUNDS) for kernel in kernels)


def gemm_rate(dtype: torch.dtype) -> float:
    """Operations per second of a large product of `dtype`, float or int8: the best of two kernels.

    A multiplication and the addition of its result are two operations.
    """
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-9, 9, (GEMM_ROWS, GEMM_SIDE), generator=draw).to(dtype)
    weight = torch.randint(-9, 9, (GEMM_SIDE, GEMM_SIDE), generator=draw).to(dtype)
    kernels: list[Callable[[], object]]
    if dtype == torch.int8:
        column_major = weight.t().contiguous().t()
        kernels = [lambda: torch._int_mm(x, weight), lambda: torch._int_mm(x, column_major)]
    else:
        kernels = [lambda: torch.mm(x, weight.t())]
        if torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
            packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_HINT)
            product = torch.ops.mkldnn._linear_pointwise.default
            kernels.append(lambda: product(x, packed, None, "none", [], ""))
    operations = 2 * GEMM_ROWS * GEMM_SIDE**2
    return max(_best_rate(kernel, operations, GEMM_ROUNDS) for kernel in kernels)


def _best_rate(kernel: Callable[[], object], amount: int, rounds: int) -> float:
    """`amount`, bytes or operations, per second in the fastest of `rounds`."""
    seconds = []
    for _ in range(rounds):
        started = perf_counter()
        kernel()
        seconds.append(perf_counter() - started)
    return amount / min(seconds)


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
