"""llama.cpp's programs, as somebody built them: one checkpoint to GGUF files, and their speed.

Knows no engine. Builds nothing: a folder has `llama-batched-bench`, `llama-bench` and
`llama-quantize`, a checkout of the sources has `convert_hf_to_gguf.py`.
"""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

BATCHED_BENCH, BENCH, QUANTIZE = "llama-batched-bench", "llama-bench", "llama-quantize"
PLAIN, QUANTIZED = "f32", "q8_0"
CONTEXT = 8192
RUN_S = 300.0
TAIL = 800

Config = dict[str, Any]
LineT = TypeVar("LineT", bound=msgspec.Struct)
# The converter knows a tokenizer by a digest, and ends at one that it has not seen. For speed any
# of its splitting rules will do.
_CONVERT = """
import runpy, sys
from pathlib import Path
sys.argv = sys.argv[1:]
sources = Path(sys.argv[0]).parent
sys.path[:0] = [str(sources), str(sources / "gguf-py")]
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
runpy.run_path(sys.argv[0], run_name="__main__")
"""
# Qwen3.5 as published predicts several tokens, a random one has no such layers.
_WORDS: Mapping[str, Sequence[str]] = MappingProxyType({"Qwen3_5ForCausalLM": ["--no-mtp"]})


class LlamaCppError(Exception):
    """A program of llama.cpp is missing, failed, or printed what is not known here."""


class _Decoded(msgspec.Struct, frozen=True):
    """One line of `llama-batched-bench`: `pl` sequences of `pp` tokens get `tg` each."""

    pp: int
    tg: int
    pl: int
    speed_tg: float


class _Prefilled(msgspec.Struct, frozen=True):
    """One line of `llama-bench`; `avg_ts`: tokens per second."""

    n_prompt: int
    n_gen: int
    avg_ts: float


class LlamaCpp:
    """The programs of one build. `place`: their folder, or one of them.

    Raises LlamaCppError if one of them, or the converter, is not there.
    """

    def __init__(self, place: Path, converter: Path, *, threads: int) -> None:
        folder = place if place.is_dir() else place.parent
        self._programs = {name: folder / name for name in (BATCHED_BENCH, BENCH, QUANTIZE)}
        self._converter = converter.absolute()
        self._threads = str(threads)
        files = (*self._programs.values(), self._converter)
        if missing := [str(file) for file in files if not file.is_file()]:
            raise LlamaCppError(f"llama.cpp: there is no {', no '.join(missing)}")

    def convert(self, checkpoint: Path, kind: str) -> Path:
        """A file of one kind (f32, bf16, q8_0) beside the checkpoint, which has a tokenizer."""
        file = checkpoint.with_name(f"{checkpoint.name}-{kind}.gguf")
        if file.exists():
            return file
        if kind == QUANTIZED:
            plain = self.convert(checkpoint, PLAIN)
            _run([str(self._programs[QUANTIZE]), str(plain), str(file), kind])
            return file
        config = json.loads((checkpoint / "config.json").read_text())
        words = ["--outtype", kind, "--outfile", str(file), *_WORDS.get(_architecture(config), ())]
        folder = _for_the_converter(checkpoint, config)
        _run([sys.executable, "-c", _CONVERT, str(self._converter), str(folder), *words])
        shutil.rmtree(folder)
        return file

    def decode(self, model: Path, *, prompt: int, tokens: int, batch: int) -> float:
        """Tokens per second of `batch` sequences, `tokens` each after `prompt` tokens."""
        sizes = ["-npp", str(prompt), "-ntg", str(tokens), "-npl", str(batch)]
        memory = ["-c", str(CONTEXT), "-b", "2048", "-ub", "512"]
        options = [*sizes, *memory, "-tb", self._threads, "--output-format", "jsonl"]
        text = self._measure(BATCHED_BENCH, model, options)
        return decode_speed(text, prompt=prompt, tokens=tokens, batch=batch)

    def prefill(self, model: Path, tokens: int) -> float:
        """Tokens per second of one prompt of `tokens`."""
        options = ["-p", str(tokens), "-n", "0", "-r", "1", "-o", "jsonl"]
        return prefill_speed(self._measure(BENCH, model, options), tokens)

    def _measure(self, name: str, model: Path, options: Sequence[str]) -> str:
        return _run([str(self._programs[name]), "-m", str(model), "-t", self._threads, *options])


def decode_speed(text: str, *, prompt: int, tokens: int, batch: int) -> float:
    """Tokens per second that `llama-batched-bench --output-format jsonl` printed.

    Raises LlamaCppError unless it is one line of just that case.
    """
    line = _only_line(text, _Decoded, BATCHED_BENCH)
    if (line.pp, line.tg, line.pl) != (prompt, tokens, batch) or line.speed_tg <= 0:
        raise LlamaCppError(f"{BATCHED_BENCH} measured another case: {line}")
    return line.speed_tg


def prefill_speed(text: str, tokens: int) -> float:
    """Tokens per second that `llama-bench -o jsonl` printed; raises as `decode_speed`."""
    line = _only_line(text, _Prefilled, BENCH)
    if (line.n_prompt, line.n_gen) != (tokens, 0) or line.avg_ts <= 0:
        raise LlamaCppError(f"{BENCH} measured another case: {line}")
    return line.avg_ts


def _only_line(text: str, kind: type[LineT], program: str) -> LineT:
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) != 1:
        raise LlamaCppError(f"{program} printed {len(lines)} lines, not one: {text[-TAIL:]!r}")
    try:
        return msgspec.json.decode(lines[0], type=kind)
    except msgspec.DecodeError as error:
        raise LlamaCppError(f"{program} printed {lines[0][:TAIL]!r}: {error}") from error


def _run(command: Sequence[str]) -> str:
    """Its standard output. Raises LlamaCppError with the end of what it says if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True)
    except subprocess.CalledProcessError as error:
        ended = f"{command[0]} ... {command[-1]} ended with {error.returncode}"
        raise LlamaCppError(f"{ended}: {error.stderr[-TAIL:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LlamaCppError(str(error)) from error
    return done.stdout


def _architecture(config: Config) -> str:
    return str(config["architectures"][0])


def _for_the_converter(checkpoint: Path, config: Config) -> Path:
    """A folder of links to the checkpoint's files, but for its config in the published words.

    A `model_type` that transformers knows would make the converter read the config with all the
    defaults of transformers, experts among them.
    """
    folder = checkpoint.with_name(f"{checkpoint.name}-for-gguf")
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            (folder / file.name).symlink_to(file.absolute())
    reword = _REWORD.get(_architecture(config), dict)
    config = {**reword(config), "model_type": "raw"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def _granite(config: Config) -> Config:
    names = {"linear_attention": "mamba", "full_attention": "attention"}
    return {**config, "layer_types": [names.get(one, one) for one in config["layer_types"]]}


def _nemotron_h(config: Config) -> Config:
    """Layers as a pattern, and no word of experts: a dense model has none."""
    letters = {"linear_attention": "M", "full_attention": "*", "mlp": "-"}
    pattern = "".join(letters[kind] for kind in config["layers_block_type"])
    dropped = {"layers_block_type", "n_group", "topk_group"}
    kept = {
        key: value for key, value in config.items() if key not in dropped and "expert" not in key
    }
    return {**kept, "hybrid_override_pattern": pattern, "num_hidden_layers": len(pattern)}


_REWORD: Mapping[str, Callable[[Config], Config]] = MappingProxyType(
    {"GraniteMoeHybridForCausalLM": _granite, "NemotronHForCausalLM": _nemotron_h}
)
