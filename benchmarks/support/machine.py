"""The machine behind the figures: core, threads, load, and the speed of memory."""

import os
import platform
from collections.abc import Callable
from time import perf_counter

import msgspec
import torch

STREAM_ROUNDS = 10


class Machine(msgspec.Struct, frozen=True):
    """The machine of one run; `load` is the one-minute average when it started."""

    cpu: str
    cores: int
    pinned_to: str
    threads: int
    torch: str
    load: float


def prepare(cpu: str) -> Machine:
    """One torch thread; this process and its children stay on the cores `cpu` (`0,1`, `all`)."""
    torch.set_num_threads(1)
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
        f"core {host.pinned_to} of {host.cores}"
        if host.pinned_to != "all"
        else f"{host.cores} cores"
    )
    software = f"{host.threads} torch thread, torch {host.torch}"
    return f"{host.cpu}, {cores}, {software}, load {host.load:.1f}"


def read_bandwidth(nbytes: int) -> float:
    """Bytes per second at which one thread reads `nbytes` again and again: the best of two kernels.

    The size matters: weights that fit a cache stream from there, in the benchmark as in the model.
    """
    rows = torch.ones(nbytes // 4096, 1024)
    vector = torch.ones(1024)
    rates = [
        _best_rate(kernel, rows.nbytes) for kernel in (rows.sum, lambda: torch.mv(rows, vector))
    ]
    return max(rates)


def _best_rate(kernel: Callable[[], object], nbytes: int) -> float:
    seconds = []
    for _ in range(STREAM_ROUNDS):
        started = perf_counter()
        kernel()
        seconds.append(perf_counter() - started)
    return nbytes / min(seconds)


def _cpu_name() -> str:
    with open("/proc/cpuinfo") as lines:
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
