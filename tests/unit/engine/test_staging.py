"""Weights on their way to a device: through a few blocks, each used again after its copy's event.

Doubles of a device. `meta` tensors have no bytes, so whoever reads one on the host fails. And on
the CPU a device whose copies happen at the last moment: when somebody waits for their event.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from benchmarks.support.small_models import configs, widen
from engine.families.registry import read_config
from engine.layers import linear, rotary
from engine.layers.linear import load_linear
from engine.model_configs.quantization import Float8Config
from engine.models.loader import load_and_identify, load_model
from engine.ops.backend import torch_ops
from engine.weights import files as weight_files
from engine.weights import float8, staging, weights
from engine.weights.digest import WeightsDigest
from engine.weights.files import WeightFiles
from engine.weights.staging import NUM_BLOCKS, Staging
from engine.weights.weights import Weights
from tests.support.nodes.oracle import Runner
from tests.tiers import everyday
from tests.unit.engine.test_weight_files import resident

CPU, META = torch.device("cpu"), torch.device("meta")
BLOCK, SLICE = 1024, 4096
ROWS, COLUMNS = 96, 80
FAMILIES = ("qwen3_5", "falcon_h1", "olmo_hybrid", "lfm2", "bamba", "gemma3", "qwen3")
"""Without experts and latent attention: their operators keep matrices in another order."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small tensors have many."""
    cut(monkeypatch, BLOCK, SLICE)
    monkeypatch.setattr(rotary, "FIRST_TABLE", 1)


def cut(monkeypatch: pytest.MonkeyPatch, block: int, part: int) -> None:
    for module in (weight_files, staging):
        monkeypatch.setattr(module, "BLOCK_BYTES", block)
    monkeypatch.setattr(linear, "SLICE_BYTES", part)
    monkeypatch.setattr(float8, "NUMBERS_ON_DEVICE", part // 4)
    monkeypatch.setattr(float8, "NUMBERS", part // 4)


class OneThread:
    """Reads in the calling thread: a mode of torch sees no other."""

    def __init__(self, *_: object) -> None:
        self.submit = self.shutdown = lambda *_, **__: None

    def map(self, read: Callable[[int], None], offsets: Iterable[int]) -> Iterable[None]:
        return map(read, offsets)


class Temporaries(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes on `meta`: the largest result of an operator, and `made` by all calls of `empty`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.largest = self.made = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {storage(it) for it in tree_leaves((args, kwargs)) if isinstance(it, Tensor)}
        for it in tree_leaves(out):
            if not isinstance(it, Tensor) or not it.is_meta or storage(it) in before:
                continue
            if func is torch.ops.aten.empty.memory_format:
                self.made += it.nbytes
            else:
                self.largest = max(self.largest, it.untyped_storage().nbytes())
        return out


def storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def on_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU is loaded as a device is."""
    monkeypatch.setattr(weights, "staging_for", Staging)


def save_model(folder: Path, family: str) -> Path:
    model = widen(AutoModelForCausalLM.from_config(configs(256)[family]), 3)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def save_float8(folder: Path, *, scale: Tensor, rows: int = ROWS, columns: int = COLUMNS) -> None:
    draw = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=draw).to(torch.float8_e4m3fn)
    save_file({"a.weight": weight, "a.weight_scale": scale}, folder / "model.safetensors")


def open_weights(files: WeightFiles, device: torch.device, **changes: Any) -> Weights:
    given: dict[str, Any] = {"dtype": torch.bfloat16, "ops": torch_ops(), "renames": ()}
    given |= changes
    return Weights(files, given.pop("dtype"), device, **given)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family", everyday(FAMILIES, FAMILIES[:3]))
def test_a_load_reads_no_byte_of_a_device_and_holds_slices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, dtype: str
) -> None:
    """Also of the other type, multiplied by scales and put into another order."""
    save_model(tmp_path, family)
    monkeypatch.setattr(weight_files, "ThreadPoolExecutor", OneThread)
    with Temporaries() as seen:
        load_model(tmp_path, read_config(tmp_path, dtype), META)
    assert seen.largest <= SLICE
    assert max(it.nbytes for it in load_file(tmp_path / "model.safetensors").values()) > 8 * SLICE


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("block", [None, (8, 16)])
def test_8_bit_floats_are_multiplied_out_where_they_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: tuple[int, int] | None
) -> None:
    scale = torch.rand((ROWS, 1) if block is None else (ROWS // 8, COLUMNS // 16))
    save_float8(tmp_path, scale=scale)
    monkeypatch.setattr(weight_files, "ThreadPoolExecutor", OneThread)
    with WeightFiles(tmp_path) as files, Temporaries() as seen:
        own = open_weights(files, META, quantization=Float8Config(block))
        load_linear(own, {"a": ROWS}, inputs=COLUMNS, order=torch.arange(ROWS), input_scale=2.0)
        own.finish()
    assert seen.largest <= SLICE < ROWS * COLUMNS
    assert seen.made <= 2 * ROWS * COLUMNS + scale.nbytes, "the matrix and its scales, and no more"


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("family", everyday(FAMILIES, ("qwen3_5", "falcon_h1")))
def test_a_device_has_the_model_that_the_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """In float32 the blocks are converted, scales are folded in and outputs reordered in slices."""
    save_model(tmp_path, family)
    config = read_config(tmp_path, "float32")
    tokens = {0: list(range(3, 60))}

    def logits() -> Tensor:
        return Runner(config, load_model(tmp_path, config, CPU)).step({}, tokens)[0]

    expected = logits()
    on_device(monkeypatch)
    assert torch.equal(logits(), expected)


class LateEvent:
    """Whoever waits for it has the copies before it made."""

    def __init__(self, _device: torch.device) -> None:
        self.copies: list[Callable[[], None]] = []

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        while self.copies:
            self.copies.pop(0)()


@pytest.fixture
def late_copies(small_blocks: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    on_device(monkeypatch)
    monkeypatch.setattr(staging, "new_event", LateEvent)
    copy_to = staging._Block.copy_to

    def queue(block: Any, target: Tensor, dtype: torch.dtype) -> None:
        block.event.copies.append(partial(copy_to, block, target, dtype))

    monkeypatch.setattr(staging._Block, "copy_to", queue)
    yield


@pytest.mark.usefixtures("late_copies")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_block_is_filled_anew_after_its_copy_and_a_load_ends_after_all(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    large = torch.randn(5 * NUM_BLOCKS, BLOCK // 2).to(torch.bfloat16)
    save_file({"large": large, "none": torch.empty(0, 3)}, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        own = open_weights(files, CPU, dtype=dtype)
        found, none = own.take("large", large.shape), own.take("none", (0, 3))
        own.finish()
    assert torch.equal(found, large.to(dtype)) and none.shape == (0, 3)


@pytest.mark.parametrize("is_device", [False, True])
def test_8_bit_floats_take_the_memory_of_what_they_become(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_device: bool
) -> None:
    """On the host, too: neither the stored bytes nor float32 numbers are whole beside it."""
    if is_device:
        on_device(monkeypatch)
    cut(monkeypatch, 1 << 18, 1 << 20)
    rows, columns = 1 << 14, 1 << 10
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, width in ((small, 8), (large, columns)):
        folder.mkdir()
        # The bits of 1.0.
        weight = torch.full((rows, width), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn)
        tensors = {"a.weight": weight, "a.weight_scale": torch.full((rows, 1), 3.0)}
        save_file(tensors, folder / "model.safetensors")
    del weight, tensors
    # Libraries that torch loads when it is first asked are no part of it.
    load_reversed(small, rows, 8)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    product = load_reversed(large, rows, columns)
    peak = resident("VmHWM") - before
    x = torch.zeros(1, columns, dtype=torch.float16)
    x[0, 0] = 1
    assert torch.equal(product(x), torch.full((1, rows), 1.5, dtype=torch.float16))
    assert peak < 2 * rows * columns + (12 << 20), "less than the stored bytes, which are 16 MiB"


def load_reversed(folder: Path, rows: int, columns: int) -> Any:
    order = torch.arange(rows).flip(0)
    with WeightFiles(folder) as files:
        own = open_weights(files, CPU, dtype=torch.float16, quantization=Float8Config())
        return load_linear(own, {"a": rows}, inputs=columns, order=order, input_scale=0.5)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize("place", [None, 0, -1], ids=["equal", "first", "last"])
def test_a_head_that_equals_the_embeddings_is_not_loaded(tmp_path: Path, place: int | None) -> None:
    config = configs(256)["qwen3"]
    widen(AutoModelForCausalLM.from_config(config), 3).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors["model.embed_tokens.weight"].clone()
    if place is not None:
        head[place, place] += 1
    save_file(tensors | {"lm_head.weight": head}, tmp_path / "model.safetensors")
    read = read_config(tmp_path)
    model: Any
    model, _ = load_and_identify(tmp_path, read, CPU)
    hidden = torch.eye(64)
    torch.testing.assert_close(model.logits(hidden), head.t(), rtol=1e-5, atol=1e-5)
    with WeightFiles(tmp_path) as files:
        digest = WeightsDigest(files)
        own = open_weights(files, CPU)
        names = ("lm_head.weight", "model.embed_tokens.weight")
        assert own.holds_twice(*names) == (place is None)
        compared = digest.result()
    with WeightFiles(tmp_path) as files:
        assert WeightsDigest(files).result() == compared, "what was compared still counts once"


def test_8_bit_floats_with_other_scales_are_two_tensors(tmp_path: Path) -> None:
    one = torch.ones(4, 4).to(torch.float8_e4m3fn)
    tensors = {"a": one, "b": one.clone(), "a_scale": torch.ones(()), "b_scale": 2 * torch.ones(())}
    save_file(tensors, tmp_path / "model.safetensors")
    with WeightFiles(tmp_path) as files:
        assert not open_weights(files, CPU, quantization=Float8Config()).holds_twice("a", "b")
