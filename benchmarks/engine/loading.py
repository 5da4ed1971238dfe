"""`python -m benchmarks.engine.loading`: how fast a model loads, beside a plain read of its files.

A Qwen3 of small layers, random, about 1 GB in bfloat16 in two files. Every run is a process of its
own, as a node is, in alternating rounds; each is timed from the first byte on, without imports:

- `plain read`: one thread reads file after file into memory that is its own, and drops it.
- `one buffer`: the same into 8 MiB that are used again. It makes no memory, which a model needs:
  the kernel clears each page that is new.
- a load: `load_and_identify`, with the digest computed, or known from an earlier start.

Warm rounds read from the page cache. Before each run of a cold one the kernel is told to drop the
files' pages; what a disk or a host below keeps, nobody here can drop.

Peak: of resident memory while it loads, less what the process had before, over what it has more
when the model is there. It counts all pages, also mapped ones. `files` is the peak over the bytes
of the files: of float32 it also holds that the model keeps a second, packed copy of its matrices.
"""

import gc
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Annotated

import msgspec
import torch
import transformers
import typer
from safetensors.torch import save_file

from benchmarks.support import machine, report
from benchmarks.support.pairs import Spread, Way, alternate, turns
from benchmarks.support.plots import grouped_bars
from engine.families.registry import read_config
from engine.models.loader import load_and_identify
from engine.weights.digest import BESIDE, TICK_NS
from serving.process import configure_logging

SECONDS = (360, 120)
LAYERS = (30, 1)
BUFFER_BYTES = 8 << 20
PLAIN, BUFFER = "plain read", "one buffer"
WARM: Mapping[str, tuple[str, bool]] = {
    "bfloat16, digest computed": ("bfloat16", False),
    "bfloat16, digest known": ("bfloat16", True),
    "float32, digest computed": ("float32", False),
}
COLD = "bfloat16, digest computed"
HEADERS = ("case", "GB/s", "of a plain read", "of one buffer", "peak of kept", "peak of files")


class Sample(msgspec.Struct, frozen=True):
    """One run: seconds, and bytes of resident memory that it kept and had at most."""

    seconds: float
    kept: int = 0
    peak: int = 0


Samples = Mapping[str, list[Sample]]


class Row(msgspec.Struct, frozen=True):
    """One case: GB/s, and ratios inside a round; no memory for plain reads."""

    case: str
    rate: Spread
    of_plain: Spread | None
    of_buffer: Spread | None
    of_kept: Spread | None
    of_files: Spread | None


def save_model(folder: Path, layers: int) -> Path:
    """A random checkpoint in two files, in bfloat16."""
    config = transformers.Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        vocab_size=32_768,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        eos_token_id=1,
    )
    with torch.device("meta"):
        shapes = transformers.AutoModelForCausalLM.from_config(config).state_dict()
    names = [name for name in shapes if name != "lm_head.weight"]
    weight_map: dict[str, str] = {}
    for number, part in enumerate((names[: len(names) // 2], names[len(names) // 2 :])):
        file = f"model-{number}.safetensors"
        save_file(
            {n: torch.empty(shapes[n].shape, dtype=torch.bfloat16).normal_() for n in part},
            folder / file,
        )
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(config.to_json_string())
    return folder


def files_of(folder: Path) -> list[Path]:
    """The weights' files."""
    return sorted(folder.glob("*.safetensors"))


def read_plainly(folder: Path) -> Sample:
    """Each file into memory of its own."""
    started = perf_counter()
    for path in files_of(folder):
        path.read_bytes()
    return Sample(perf_counter() - started)


def read_into_one_buffer(folder: Path) -> Sample:
    """All files into the same memory."""
    buffer = bytearray(BUFFER_BYTES)
    started = perf_counter()
    for path in files_of(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return Sample(perf_counter() - started)


def load(folder: Path, dtype: str) -> Sample:
    """A whole model, and what it took."""
    configure_logging("error")
    torch.set_num_threads(1)
    config = read_config(folder, dtype)
    gc.collect()
    # The peak of this process begins anew.
    Path("/proc/self/clear_refs").write_text("5")
    before, started = resident("VmRSS"), perf_counter()
    model = load_and_identify(folder, config, torch.device("cpu"))
    seconds = perf_counter() - started
    kept, peak = resident("VmRSS"), resident("VmHWM")
    del model
    return Sample(seconds, kept - before, peak - before)


def resident(key: str) -> int:
    """Bytes of this process's status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(key))


class Bench:
    """Runs in processes of their own, of the model in `folder`."""

    def __init__(self, folder: Path, run: Callable[[Callable[[], Sample]], Sample]) -> None:
        self._folder = folder
        self._run = run
        self.num_bytes = sum(path.stat().st_size for path in files_of(folder))
        # A record of digests is kept of files that are some time old.
        sleep(1.5 * TICK_NS / 1e9)
        self._run(partial(load, folder, "bfloat16"))
        self._record = (folder / BESIDE).read_bytes()

    def plain(self, *, cold: bool) -> Sample:
        """Into memory of its own."""
        return self._once(partial(read_plainly, self._folder), cold=cold)

    def buffer(self) -> Sample:
        """Into one buffer."""
        return self._once(partial(read_into_one_buffer, self._folder), cold=False)

    def load(self, dtype: str, *, known: bool, cold: bool) -> Sample:
        """The model."""
        record = self._folder / BESIDE
        record.unlink(missing_ok=True)
        if known:
            record.write_bytes(self._record)
        return self._once(partial(load, self._folder, dtype), cold=cold)

    def _once(self, what: Callable[[], Sample], *, cold: bool) -> Sample:
        for path in files_of(self._folder):
            with path.open("rb") as file:
                os.fsync(file.fileno())
                if cold:
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return self._run(what)


def run(rounds: int, found: report.Report, *, layers: int) -> list[Row]:
    """Warm rounds, then cold ones."""
    total = (2 + len(WARM) + 2) * turns(rounds)
    spawn = multiprocessing.get_context("spawn")
    with (
        tempfile.TemporaryDirectory() as folder,
        ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool,
        report.progress(found.console, total) as describe,
    ):
        done = describe("checkpoint")
        bench = Bench(save_model(Path(folder), layers), lambda what: pool.submit(what).result())
        warm: dict[str, Way[Sample]] = {
            PLAIN: partial(bench.plain, cold=False),
            BUFFER: bench.buffer,
            **{
                case: partial(bench.load, dtype, known=known, cold=False)
                for case, (dtype, known) in WARM.items()
            },
        }
        dtype, known = WARM[COLD]
        cold: dict[str, Way[Sample]] = {
            PLAIN: partial(bench.plain, cold=True),
            COLD: partial(bench.load, dtype, known=known, cold=True),
        }
        rows = []
        for left, (state, ways) in zip((2, 1), {"warm": warm, "cold": cold}.items(), strict=True):
            describe(state)
            samples = alternate(ways, rounds, until=found.share(left), done=done)
            rows += [
                row_of(f"{state}, {case}", own, samples, num_bytes=bench.num_bytes)
                for case, own in samples.items()
            ]
    return rows


def row_of(case: str, own: list[Sample], beside: Samples, *, num_bytes: int) -> Row:
    """One case beside the plain reads of the same rounds."""
    seconds = [sample.seconds for sample in own]

    def speed_of(other: str) -> Spread | None:
        if other not in beside:
            return None
        return Spread.of_ratio([sample.seconds for sample in beside[other]], seconds)

    is_load = all(sample.kept for sample in own)
    return Row(
        case,
        Spread.of([num_bytes / 1e9 / one for one in seconds]),
        speed_of(PLAIN),
        speed_of(BUFFER),
        Spread.of([it.peak / it.kept for it in own]) if is_load else None,
        Spread.of([it.peak / num_bytes for it in own]) if is_load else None,
    )


def cells(row: Row) -> list[str]:
    """One line of the table."""
    ratios = (row.of_plain, row.of_buffer, row.of_kept, row.of_files)
    return [row.case, row.rate.show(), *("-" if it is None else it.show() for it in ratios)]


def main(
    *,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds that count, after one warm-up.")] = 5,
    cpu: Annotated[str, typer.Option(help="Core to run on, or `all`.")] = "all",
    quick: report.Quick = False,
    out: report.Out = report.RESULTS,
) -> None:
    """Speed and peak memory of a load, beside a plain read of the same files, warm and cold."""
    found = report.Report("loading", out, SECONDS, cpu=cpu, quick=quick)
    rows = run(1 if quick else rounds, found, layers=LAYERS[quick])
    host = machine.describe(found.host)
    note = f"median of at most {rounds} rounds, each run a process of its own; {host}"
    found.publish("Loading a model", headers=HEADERS, rows=list(map(cells, rows)), note=note)
    series = {"GB/s": [row.rate for row in rows]}
    grouped_bars(found.plot(), [row.case for row in rows], series, ylabel="GB/s")
    found.save(rows)


if __name__ == "__main__":
    typer.run(main)
