"""The phase `kernels`: single kernels in the shapes of Qwen3.5-4B and Nemotron-H-8B.

A floor is the bytes that a kernel must move, at the card's rate of copying, or the products that it
must compute. Steps are timed in CUDA graphs, of which each call works on another layer's states, as
in a model; segments are launched one after the other. States lie in units of all layers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from benchmarks.gpu.alternatives import changed
from benchmarks.gpu.kernel_inputs import (
    Sizes,
    attention_inputs,
    delta_inputs,
    duality_inputs,
    states_index,
)
from benchmarks.gpu.sheet import BYTES, Ceilings, Setting, Sheet
from benchmarks.support import interpreter
from engine.arena import ArenaMemory
from engine.model_configs.feed_forward import Activation
from engine.model_configs.recurrent import Gating
from engine.ops.backend import Ops, Product, cuda_ops, torch_ops
from engine.ops.gated_delta_rule import cuda as delta_kernels
from engine.ops.paged_attention import cuda as attention_kernels
from engine.step import SamplingInput
from engine.types import SamplingParams
from engine.worker import device_sampler

STEP_CHANGES = (
    {"TILE": 2048},
    {"TILE": 2048, "num_warps": 2},
    {"TILE": 4096, "num_warps": 2},
    {"TILE": 4096, "num_warps": 8},
    {"TILE": 8192},
    {"TILE": 8192, "num_warps": 8},
    {"TILE": 16384, "num_warps": 8},
)
DECODE_CHANGES = (
    {"num_stages": 2},
    {"num_stages": 4},
    {"num_warps": 8},
    {"TILE_BYTES": 16384},
    {"TILE_BYTES": 16384, "num_stages": 5},
    {"TILE_BYTES": 65536, "num_stages": 2},
    {"TILE_BYTES": 65536, "num_warps": 8},
    {"MIN_SPLIT": 512},
    {"MIN_SPLIT": 1024},
)
DIGESTED = (512 << 10, 16 << 20)
"""Bytes of a block of attention in its layers, and of a sequence's states."""


@dataclass(slots=True, frozen=True)
class Bench:
    """One run on one card."""

    sheet: Sheet
    setting: Setting
    ceilings: Ceilings
    ops: Ops
    sizes: Sizes

    def step(self, case: str, work: Callable[[int], object], nbytes: float) -> float:
        """Tells and returns the time of a kernel that moves so many bytes."""
        taken = self.setting.graph_seconds(work)
        self.tell(case, taken, nbytes / self.ceilings.copy)
        return taken

    def segment(self, case: str, work: Callable[[], object], floor: float) -> None:
        """Tells the time of kernels of one segment of a prefill."""
        self.tell(case, self.setting.queued_seconds(work), floor)

    def alternatives(
        self,
        work: Callable[[int], object],
        nbytes: float,
        *,
        module: ModuleType,
        kernel: str,
        among: Sequence[Mapping[str, int]],
    ) -> None:
        """The same in other sizes, of which the device may refuse some."""
        for changes in among:
            case = "  " + ", ".join(f"{name} {value}" for name, value in changes.items())
            with self.sheet.attempt(case), changed(module, kernel, **changes):
                self.step(case, work, nbytes)

    def tell(self, case: str, taken: float, floor: float) -> None:
        """A time beside its floor, both in seconds."""
        self.sheet.tell(
            case, f"{taken * 1e6:,.1f} us, {taken / floor:.2f} times {floor * 1e6:,.1f} us"
        )


@torch.inference_mode()
def run(sheet: Sheet, setting: Setting) -> None:
    """Each kind by itself; the two that most of a step's bytes go through in several sizes."""
    torch.manual_seed(0)
    if not setting.on_gpu:
        interpreter.patch()
    bench = Bench(
        sheet, setting, Ceilings.measure(setting), cuda_ops(), Sizes.of(small=setting.quick)
    )
    for name, case in (
        ("gated delta rule, steps", _delta_steps),
        ("paged attention, decodes", _decodes),
        ("ssd, steps", _duality_steps),
        ("convolution, steps", _convolution_steps),
        ("norms and functions", _small),
        ("output head and sampling", _head),
        ("digests", _digests),
        ("segments of states", _state_segments),
        ("segments of attention", _attention_segment),
    ):
        with sheet.attempt(name):
            case(bench)


def _delta_steps(bench: Bench) -> None:
    for count in bench.sizes.sequences:
        index = states_index([1] * count, bench.setting.device, decodes=count)
        inputs = delta_inputs(bench.sizes, index, bench.setting.device)
        work = partial(inputs.run, bench.ops.gated_delta_rule)
        case = f"gated delta rule, a step of {count} sequences"
        taken = bench.step(case, work, inputs.nbytes)
        if count == bench.sizes.sequences[-1]:
            bench.sheet.accept(case, taken * 1e3, "ms", accept=0.16, goal=0.14)
            bench.alternatives(
                work, inputs.nbytes, module=delta_kernels, kernel="_step", among=STEP_CHANGES
            )


def _decodes(bench: Bench) -> None:
    sizes = bench.sizes
    for count, length in sizes.decodes:
        inputs = attention_inputs(
            sizes, [1] * count, [length - 1] * count, device=bench.setting.device
        )
        nbytes = count * length * sizes.token_bytes

        work = partial(inputs.run, bench.ops)
        case = f"paged attention, decodes of {count} x {length:,}"
        taken = bench.setting.graph_seconds(work, 8)
        rate = nbytes / taken / 1e12
        floor = nbytes / bench.ceilings.read
        bench.sheet.tell(
            case, f"{taken * 1e6:,.1f} us, {rate:.2f} TB/s, {taken / floor:.2f} times reading"
        )
        if (count, length) == sizes.decodes[0]:
            bench.sheet.accept(case, rate, "TB/s", accept=2.8, goal=3.4, at_least=True)
        if (count, length) in sizes.decodes[:2]:
            bench.alternatives(
                work, nbytes, module=attention_kernels, kernel="decode_kernel", among=DECODE_CHANGES
            )


def _duality_steps(bench: Bench) -> None:
    for count in bench.sizes.sequences:
        index = states_index([1] * count, bench.setting.device, decodes=count)
        inputs = duality_inputs(bench.sizes, index, bench.setting.device)
        work = partial(inputs.run, bench.ops.ssd)
        bench.step(f"ssd, a step of {count} sequences", work, inputs.nbytes)


def _convolution_steps(bench: Bench) -> None:
    count, channels, device = bench.sizes.sequences[-1], bench.sizes.channels, bench.setting.device
    kind = bench.sizes.dtype
    x = torch.randn(count, channels, device=device, dtype=kind)
    weight = torch.randn(4, channels, device=device, dtype=kind)
    pools = torch.randn(8, count + 1, 3, channels, device=device, dtype=kind)
    index = states_index([1] * count, device, decodes=count)
    bench.step(
        f"convolution, a step of {count} sequences",
        lambda number: bench.ops.causal_conv1d(x, pools[number % 8], index, weight, None),
        2 * count * pools[0, 0].nbytes + 2 * x.nbytes,
    )


def _small(bench: Bench) -> None:
    """Small ones: at these sizes a launch costs as much as the bytes, also in a graph."""
    count, width, device = bench.sizes.sequences[-1], bench.sizes.hidden, bench.setting.device
    kind, ops = bench.sizes.dtype, bench.ops
    x, residual = torch.randn(2, count, width, device=device, dtype=kind)
    norm = ops.norm(torch.ones(width, device=device), 1e-6, kind)
    bench.step(f"norm, {count} rows", lambda _: norm(x), 2 * x.nbytes)
    bench.step(f"norm and sum, {count} rows", lambda _: norm(x, residual), 3 * x.nbytes)
    y = torch.randn(count, 4096, device=device)
    z = torch.randn(count, 4096, device=device, dtype=kind)
    gated = ops.gated_norm(torch.ones(128, device=device), 1e-6, gating=Gating.NORM_THEN_GATE)
    bench.step(f"gated norm, {count} rows", lambda _: gated(y, z), y.nbytes + 2 * z.nbytes)
    both = torch.randn(count, 2 * bench.sizes.inner, device=device, dtype=kind)
    silu = ops.activation(Activation.SILU, gated=True)
    bench.step(f"silu of a gate, {count} rows", lambda _: silu(both), 1.5 * both.nbytes)
    heads = torch.randn(count, bench.sizes.heads, bench.sizes.dim, device=device, dtype=kind)
    width = min(64, bench.sizes.dim)
    table = torch.randn(2, count, 1, width, device=device, dtype=kind)
    turned = 2 * width * heads.element_size() * count * bench.sizes.heads
    bench.step(f"rotary, {count} rows", lambda _: ops.rotate_(heads, table), turned)


def _head(bench: Bench) -> None:
    """The product that a recorded step does not hold, and what comes after it."""
    sizes, device = bench.sizes, bench.setting.device
    head = bench.ops.linear(
        torch.randn(sizes.vocabulary, sizes.hidden, device=device, dtype=sizes.dtype)
    )
    nbytes = sizes.vocabulary * sizes.hidden * 2
    for count in sizes.sequences:
        x = torch.randn(count, sizes.hidden, device=device, dtype=sizes.dtype)
        bench.step(f"output head of {count} rows", partial(_logits, head, x), nbytes)
        logits = head(x).float()
        for kind, params in (
            ("greedy", SamplingParams(temperature=0.0)),
            ("drawn, top-p", SamplingParams(temperature=0.8, top_p=0.9, seed=3)),
            ("drawn, top-k", SamplingParams(temperature=0.8, top_k=40, seed=3)),
        ):
            inputs = {str(row): SamplingInput(params, row) for row in range(count)}
            launch = partial(device_sampler.launch, logits, inputs)
            taken = bench.setting.queued_seconds(launch)
            bench.sheet.tell(f"sampling {count} rows, {kind}", f"{taken * 1e6:,.0f} us")


def _digests(bench: Bench) -> None:
    """Of all that a hand-over of 16,384 tokens moves, launches included."""
    nbytes = 1 << 20 if bench.setting.quick else BYTES
    with closing(ArenaMemory(nbytes, device=bench.setting.device)) as arena:
        for size in DIGESTED:
            blocks = [((at, size),) for at in range(0, nbytes - size + 1, size)]
            taken = 2 * bench.setting.seconds(partial(arena.digests, blocks))
            case = f"digests of {nbytes >> 20} MiB by {size >> 10} KiB, on both sides"
            bench.sheet.accept(case, taken * 1e3, "ms", accept=0.6, goal=0.35)


def _logits(head: Product, x: Tensor, _: int) -> Tensor:
    return head(x).float()


def _state_segments(bench: Bench) -> None:
    """Kernels of the column and torch's operators, of one segment and one layer."""
    sizes, device = bench.sizes, bench.setting.device
    tokens = sizes.segment
    index = states_index([tokens], device, decodes=0)
    inputs = delta_inputs(sizes, index, device)
    # Products of 64-token chunks with keys, values and each other, and of states.
    products = 2 * tokens * sizes.value_heads * (4 * 64 * 128 + 4 * 128 * 128)
    floor = products / bench.ceilings.product
    for name, ops in (("kernels", bench.ops), ("torch", torch_ops())):
        work = partial(inputs.run, ops.gated_delta_rule, 0)
        bench.segment(f"gated delta rule, {tokens:,} tokens, {name}", work, floor)
    inputs = duality_inputs(sizes, index, device)
    products = 2 * tokens * sizes.ssd_heads * (2 * 64 * 128 + 2 * 64 * 128)
    floor = products / bench.ceilings.product
    for name, ops in (("kernels", bench.ops), ("torch", torch_ops())):
        work = partial(inputs.run, ops.ssd, 0)
        bench.segment(f"ssd, {tokens:,} tokens, {name}", work, floor)
    x = torch.randn(tokens, sizes.channels, device=device, dtype=sizes.dtype)
    weight = torch.randn(4, sizes.channels, device=device, dtype=sizes.dtype)
    pool = torch.randn(2, 3, sizes.channels, device=device, dtype=sizes.dtype)
    bench.segment(
        f"convolution, {tokens:,} tokens",
        lambda: bench.ops.causal_conv1d(x, pool, index, weight, None),
        2 * x.nbytes / bench.ceilings.copy,
    )


def _attention_segment(bench: Bench) -> None:
    """With its gathering of pages; the floor is of the products alone."""
    sizes = bench.sizes
    for context in (0, sizes.context):
        tokens = sizes.segment
        inputs = attention_inputs(
            sizes, [tokens], [context], device=bench.setting.device, decodes=0
        )
        pairs = tokens * context + tokens * tokens / 2
        floor = 4 * pairs * sizes.heads * sizes.dim / bench.ceilings.product
        bench.segment(
            f"paged attention, {tokens:,} tokens after {context:,}",
            partial(inputs.run, bench.ops, 0),
            floor,
        )
