"""Output of llama.cpp's programs: read as it is, or refused with the program's name."""

import json
from pathlib import Path

import pytest

from benchmarks.engine.engine_vs_llama import Case, Peer, Row, lines
from benchmarks.support.llama_cpp import LlamaCpp, LlamaCppError, decode_speed, prefill_speed
from benchmarks.support.pairs import Spread
from benchmarks.support.work import DECODE, PREFILL, Work

# As version 0c1e570 prints them, but for fields that say how it was started.
DECODED = {"n_batch": 2048, "pp": 64, "tg": 8, "pl": 2, "t_tg": 0.294, "speed_tg": 54.4, "t": 0.8}
PREFILLED = {"backends": "CPU", "n_prompt": 64, "n_gen": 0, "avg_ns": 303762533, "avg_ts": 210.7}


def decode(text: str, batch: int = 2) -> float:
    return decode_speed(text, prompt=64, tokens=8, batch=batch)


def test_the_speeds_are_those_of_the_printed_case() -> None:
    assert decode(f"\n{json.dumps(DECODED)}\n") == 54.4
    assert prefill_speed(json.dumps(PREFILLED), 64) == 210.7


@pytest.mark.parametrize(
    "text",
    [
        "",
        "|    PP |     TG |    B |\n|-------|--------|------|\n",
        f"{json.dumps(DECODED)}\n{json.dumps(DECODED)}",
        json.dumps({**DECODED, "speed_tg": "fast"}),
        json.dumps({key: value for key, value in DECODED.items() if key != "speed_tg"}),
        json.dumps({**DECODED, "pl": 1}),
        json.dumps({**DECODED, "speed_tg": 0.0}),
        json.dumps(PREFILLED),
    ],
)
def test_other_output_of_the_batched_bench_is_refused_by_name(text: str) -> None:
    with pytest.raises(LlamaCppError, match="llama-batched-bench"):
        decode(text)


@pytest.mark.parametrize("change", [{"n_prompt": 512}, {"n_gen": 128}, {"avg_ts": None}])
def test_other_output_of_the_bench_is_refused_by_name(change: dict[str, object]) -> None:
    with pytest.raises(LlamaCppError, match="llama-bench"):
        prefill_speed(json.dumps({**PREFILLED, **change}), 64)


def test_programs_that_are_not_there_are_named(tmp_path: Path) -> None:
    for name in ("llama-bench", "llama-quantize", "convert.py"):
        (tmp_path / name).touch()
    with pytest.raises(LlamaCppError, match=r"no .*llama-batched-bench$"):
        LlamaCpp(tmp_path / "llama-bench", tmp_path / "convert.py", threads=1)


@pytest.mark.parametrize(
    ("precision", "work", "kinds", "targets"),
    [
        (
            "bf16",
            Work(DECODE, 8, 64),
            ("bf16", "q8_0"),
            ["ratio >= 1.3 met", "ratio >= 1.3 MISSED"],
        ),
        ("bf16", Work(DECODE, 1, 96), ("bf16", "q8_0"), ["ratio >= 1.0 met", "-"]),
        ("f32", Work(DECODE, 1, 96), ("f32",), ["floor >= 0.8 MISSED"]),
        ("f32", Work(DECODE, 8, 64), ("f32",), ["-"]),
        ("f32", Work(PREFILL, 1, 1), (), ["floor >= 0.75 MISSED"]),
    ],
)
def test_a_line_per_file_has_the_target_of_its_own_ratio(
    precision: str, work: Work, kinds: tuple[str, ...], targets: list[str]
) -> None:
    speed = Spread(100.0, 90.0, 110.0)
    ratios = {"f32": 2.0, "bf16": 1.3, "q8_0": 1.2}
    peers = [Peer(kind, speed, Spread(ratios[kind], 0.1, 9.0)) for kind in kinds]
    row = Row(Case("m", precision, work), speed, 200.0, 150.0, Spread(0.7, 0.6, 0.9), peers)
    assert [line[-1] for line in lines(row)] == targets
