"""The files of a model's weights: read once, in threads, and given back also after a failure."""

import gc
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from structlog.testing import capture_logs
from torch import Tensor

from engine.errors import CheckpointError
from engine.ops.backend import torch_ops
from engine.weights import load_progress
from engine.weights.digest import WeightsDigest
from engine.weights.files import BLOCK_BYTES, WeightFiles
from engine.weights.load_progress import LoadProgress
from engine.weights.weights import Weights

CPU = torch.device("cpu")
ROWS, COLUMNS = 3 * BLOCK_BYTES // 2048 + 5, 1021
"""In 16 bits a bit more than three blocks."""


@pytest.fixture(params=[torch.bfloat16, torch.float32])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> Tensor:
    """The tensor `large`, in the only file."""
    draw = torch.Generator().manual_seed(0)
    large = torch.randn(ROWS, COLUMNS, generator=draw).to(request.param)
    save_file({"large": large, "none": torch.empty(0, 3)}, tmp_path / "model.safetensors")
    return large


def take(files: WeightFiles, dtype: torch.dtype) -> Tensor:
    return Weights(files, dtype, CPU, ops=torch_ops(), renames=()).take("large", (ROWS, COLUMNS))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_blocks_of_several_threads_make_the_tensor(
    tmp_path: Path, stored: Tensor, dtype: torch.dtype
) -> None:
    with WeightFiles(tmp_path) as files:
        assert torch.equal(take(files, dtype), stored.to(dtype))
        both = torch.zeros(2 * ROWS, COLUMNS, dtype=dtype)
        weights = Weights(files, dtype, CPU, ops=torch_ops(), renames=())
        weights.take("large", (ROWS, COLUMNS), out=both[ROWS:])
        assert torch.equal(both[ROWS:], stored.to(dtype)) and not both[:ROWS].any()
        assert weights.take("none", (0, 3)).shape == (0, 3)


def test_bytes_are_read_once_for_tensors_and_digest(tmp_path: Path, stored: Tensor) -> None:
    before = bytes_read()
    with WeightFiles(tmp_path) as files:
        digest = WeightsDigest(files)
        take(files, torch.bfloat16)
        found = digest.result()
    assert bytes_read() - before < 1.1 * stored.nbytes
    with WeightFiles(tmp_path) as files:
        assert WeightsDigest(files).result() == found, "also of tensors that nobody took"


def bytes_read() -> int:
    """By all reads of this process so far."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("rchar"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_memory_besides_the_tensor_is_a_block_per_thread(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    """The pages of the file do not count as this process's either."""
    shape = (64, 1 << 20)
    save_file({"large": torch.ones(shape, dtype=torch.bfloat16)}, tmp_path / "model.safetensors")
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    with WeightFiles(tmp_path) as files:
        tensor = Weights(files, dtype, CPU, ops=torch_ops(), renames=()).take("large", shape)
        assert resident("VmHWM") - before < 1.15 * tensor.nbytes


def resident(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


def cut(folder: Path, files: WeightFiles, stop: threading.Event) -> None:
    os.truncate(folder / "model.safetensors", BLOCK_BYTES)


def fail_to_read(folder: Path, files: WeightFiles, stop: threading.Event) -> None:
    """As a disk would; what the descriptor is now cannot be read."""
    directory = os.open(folder, os.O_RDONLY)
    os.dup2(directory, files.tensors[0].descriptor, inheritable=False)
    os.close(directory)


def cancel(folder: Path, files: WeightFiles, stop: threading.Event) -> None:
    stop.set()


def mistype(folder: Path, files: WeightFiles, stop: threading.Event) -> None:
    place = next(number for number, it in enumerate(files.tensors) if it.name == "large")
    files.tensors[place] = files.tensors[place]._replace(dtype="F4")


def nothing(folder: Path, files: WeightFiles, stop: threading.Event) -> None:
    pass


@pytest.mark.parametrize(
    ("happen", "message"),
    [
        (cut, "it ends inside a tensor"),
        (fail_to_read, "Is a directory"),
        (cancel, "is not needed any more"),
        (mistype, "'large' of type F4"),
        (nothing, None),
    ],
)
def test_nothing_is_left_of_a_load_that_fails(
    tmp_path: Path,
    stored: Tensor,
    happen: Callable[[Path, WeightFiles, threading.Event], None],
    message: str | None,
) -> None:
    before, stop = held(), threading.Event()
    with WeightFiles(tmp_path, stop) as files:
        assert held() != before
        happen(tmp_path, files, stop)
        if message is None:
            take(files, torch.bfloat16)
        else:
            with pytest.raises(CheckpointError, match=rf"model\.safetensors.*{message}"):
                take(files, torch.bfloat16)
    assert_only_held(before)


def held() -> tuple[set[str], int]:
    """Descriptors and threads of this process."""
    return set(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))


def assert_only_held(before: tuple[set[str], int]) -> None:
    """A thread that was waited for is gone for the kernel a moment later."""
    deadline = time.monotonic() + 5.0
    while held() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert held() == before


def test_a_file_that_is_no_model_leaves_none_of_the_others_open(
    tmp_path: Path, stored: Tensor
) -> None:
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    (tmp_path / "b.safetensors").write_bytes(b"no model")
    index = '{"weight_map": {"large": "a.safetensors", "other": "b.safetensors"}}'
    (tmp_path / "model.safetensors.index.json").write_text(index)
    before = held()
    with (
        pytest.raises(CheckpointError, match=r"b\.safetensors cannot be read"),
        WeightFiles(tmp_path),
    ):
        pass
    assert_only_held(before)


class Stream(io.StringIO):
    """A terminal, or a file."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@pytest.mark.parametrize("is_terminal", [True, False])
def test_progress_is_a_bar_on_a_terminal_and_log_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch, is_terminal: bool
) -> None:
    stream = Stream(is_terminal)
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(load_progress, "TELL_S", 0.0)
    with capture_logs() as lines, LoadProgress(3_000_000) as progress:
        progress.add(1_000_000)
        progress.add(2_000_000)
    told = [(line["bytes"], line["of"]) for line in lines]
    if is_terminal:
        assert not told and "3.0/3.0 MB" in stream.getvalue()
    else:
        assert told == [(1_000_000, 3_000_000), (3_000_000, 3_000_000)]
        assert stream.getvalue() == "", "the lines of the log stay whole"
