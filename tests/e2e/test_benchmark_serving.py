"""`benchmarks.serving` against servers that run already: its files, and when it refuses a table."""

import re
import subprocess
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import msgspec
import psutil
import pytest
from typer import Exit
from typer.testing import CliRunner

from benchmarks.load.agreement import Reference
from benchmarks.serving.__main__ import PURPOSE, measure
from benchmarks.serving.options import ServingOptions
from benchmarks.serving.turns import Turns
from engine.errors import ConfigError
from serving.cli import command_app
from tests.support.nodes.processes import API_KEY, ServedCluster

VLLM_FIELDS = {
    "date", "backend", "model_id", "num_prompts", "request_rate", "burstiness", "max_concurrency",
    "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests", "mean_ttft_ms", "median_ttft_ms",
    "std_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_itl_ms", "median_e2el_ms",
}  # fmt: skip


def options_of(served: ServedCluster, out: Path, **changes: Any) -> ServingOptions:
    return ServingOptions(
        **{
            "target": (f"pair={served.proxy.url}", f"alone={served.d.url}/v1"),
            "api_key": API_KEY,
            "concurrency": (2,),
            "rate": (20.0,),
            "requests": 3,
            "warmup": 1,
            "rounds": 2,
            "output_len": 8,
            "tokenizer": str(served.model),
            "random_input_len": 40,
            "out": str(out),
            **changes,
        }
    )


def run(options: ServingOptions) -> int:
    with pytest.raises(Exit) as ended:
        measure(lambda: options)
    return ended.value.exit_code


def test_two_targets_by_turns_give_results_in_vllm_s_shape(
    served: ServedCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(options_of(served, tmp_path)) == 0
    said = capsys.readouterr().out
    assert "pair: 12 of 12 greedy answers equal" in said and "Rows for benchmarks/pages" in said
    results = msgspec.json.decode((tmp_path / "serving.json").read_bytes())["data"]["results"]
    assert len(results) == 2 * 2 * 2
    for one in results:
        assert one.keys() >= VLLM_FIELDS
        assert (one["completed"], one["failed"], one["total_output_tokens"]) == (3, 0, 24)
        assert (one["total_input_tokens"], one["total_cached_tokens"]) == (120, 0)
    assert {one["label"] for one in results} == {"pair", "alone"}
    assert API_KEY not in (tmp_path / "serving.json").read_text()
    assert (tmp_path / "serving.png").read_bytes().startswith(b"\x89PNG")


def test_there_is_no_table_if_answers_differ(
    served: ServedCluster,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The reference is asked for answers that are one token shorter."""
    ask = Reference.ask

    async def shorter(self: Reference, client: Any, requests: Any, *, ends_at: float) -> None:
        fewer = [msgspec.structs.replace(one, max_tokens=7) for one in requests]
        await ask(self, client, fewer, ends_at=ends_at)
        self._answers = {
            key.replace(b",7]", b",8]"): answer for key, answer in self._answers.items()
        }

    monkeypatch.setattr(Reference, "ask", shorter)
    assert run(options_of(served, tmp_path)) == 1
    said = capsys.readouterr()
    # The last token of a random model may be no text yet, so that a few answers are equal.
    assert "of 12 greedy answers equal" in said.out and "at token 7" in said.out
    assert "Rows for benchmarks/pages" not in said.out and "answers differ" in said.err
    assert (tmp_path / "serving.json").is_file() and not (tmp_path / "serving.png").exists()


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--target", "http://127.0.0.1:9"], "127.0.0.1:9/v1/models does not answer"),
        (["--target", "127.0.0.1:9"], "'127.0.0.1:9' is no base URL: write http://HOST:PORT"),
        (["--target", "a=http://h", "--target", "a=http://i"], "two have the same name"),
        (["--goodput", "ttft"], "--goodput 'ttft' is no objective"),
        (["--concurrency", "0"], "concurrency"),
        (["--rate", "0"], "--rate 0 needs a --workload"),
        (["--workload", "absent.jsonl"], "absent.jsonl"),
    ],
)
def test_a_wrong_option_or_a_dead_target_is_one_line(
    flags: list[str], problem: str, tmp_path: Path
) -> None:
    app = command_app(ServingOptions, measure, PURPOSE)
    done = CliRunner().invoke(app, ["--out", str(tmp_path), *flags])
    assert done.exit_code == 2
    assert re.fullmatch(r"error: .*\n", done.stderr) and problem in done.stderr


def test_targets_that_are_not_asked_stand_still() -> None:
    """With their children, until the end; an unknown name or process is an error."""
    shells = [subprocess.Popen(["sh", "-c", "sleep 60; true"]) for _ in range(2)]
    roots = {name: psutil.Process(one.pid) for name, one in zip("ab", shells, strict=True)}

    def stand_still(name: str, *, wanted: bool) -> None:
        deadline = monotonic() + 10  # a signal takes a moment to arrive
        while True:
            tree = (roots[name], *roots[name].children(recursive=True))
            found = [process.status() == psutil.STATUS_STOPPED for process in tree]
            if found == [wanted, wanted]:
                return
            assert monotonic() < deadline, (name, wanted, found)
            sleep(0.01)

    try:
        for name in roots:
            stand_still(name, wanted=False)
        turns = Turns([f"{name}={root.pid}" for name, root in roots.items()], "ab")
        for name, other in (("a", "b"), ("b", "a")):
            turns.take(name)
            stand_still(name, wanted=False)
            stand_still(other, wanted=True)
        turns.close()
        for name in roots:
            stand_still(name, wanted=False)
        for wrong, why in ((f"c={shells[0].pid}", "NAME=PID"), ("a=4194305", "no such process")):
            with pytest.raises(ConfigError, match=why):
                Turns([wrong], "ab")
    finally:
        for root in roots.values():
            for process in (*root.children(recursive=True), root):
                process.kill()
        for shell in shells:
            shell.wait(10)
