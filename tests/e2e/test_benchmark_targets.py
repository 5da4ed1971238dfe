"""The serving benchmarks as an operator runs them: against servers that are up, into files."""

import asyncio
import json
import re
import sys
from collections.abc import AsyncGenerator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer import Exit
from typer.testing import CliRunner

from benchmarks.serving.conversation import PURPOSE, ConversationOptions, converse
from engine.errors import EngineGenerateError
from engine.types import GenerateOutput, GenerateRequest
from serving.api.served_model import ServedModel
from serving.cli import command_app
from tests.source_tree import ROOT
from tests.support.api.api_double import (
    ScriptedGenerator,
    outputs_of,
    running,
    tiny_serving,
    tiny_tokenizer,
)
from tests.support.nodes.processes import API_KEY, ServedCluster

SCRIPT = outputs_of(range(70, 78))
SERVING = ("--concurrency", "2", "--requests", "4", "--warmup", "1", "--rounds", "2")
CONVERSATIONS = [
    {
        "id": str(number),
        "conversations": [
            {"from": "human", "value": f"hello {number}"},
            {"from": "gpt", "value": "x" * 32},
        ],
    }
    for number in range(6)
]


class Failing(ScriptedGenerator):
    """Answers the first request; of those after it, as many as `every` says fail."""

    every: int = 1

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerateOutput, None]:
        if len(self.requests) % self.every == self.every - 1 and self.requests:
            self.requests.append(request)
            raise EngineGenerateError("planted")
        async for output in super().generate(request):
            yield output


def failing(every: int) -> Failing:
    made = Failing(SCRIPT)
    made.every = every
    return made


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    """A server that tells hits."""
    tokenizer = tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return tiny_serving(tokenizer, max_model_len=4096)


@pytest.fixture(scope="module")
def silent(told: ServedModel) -> ServedModel:
    """One that does not, as is the default."""
    return tiny_serving(told.tokenizer, max_model_len=4096, enable_prompt_tokens_details=False)


async def run(module: str, *words: str, out: Path) -> tuple[int | None, str, str]:
    """Its status, and what it prints into a pipe."""
    command = (sys.executable, "-m", f"benchmarks.{module}", *words, "--out", str(out))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=pipe, stderr=pipe)
    try:
        said, errors = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, said.decode(), errors.decode()


def data_of(out: Path, name: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = msgspec.json.decode((out / f"{name}.json").read_bytes())["data"]
    return found


async def test_each_option_reaches_the_server_and_each_file_is_written(
    silent: ServedModel, tmp_path: Path
) -> None:
    """The header is the only one that has the key; sampled answers are compared with nothing."""
    load, log, plot = (tmp_path / name for name in ("load.json", "log.jsonl", "timeline.png"))
    load.write_text(json.dumps(CONVERSATIONS))
    generator = ScriptedGenerator(SCRIPT)
    async with running(generator, silent, api_key="secret") as url:
        status, said, errors = await run(
            *("serving", "--target", f"ray={url}", *SERVING, "--workload", str(load)),
            *("--header", "Authorization=Bearer secret", "--temperature", "0.5"),
            *("--extra-body", '{"top_k": 7}', "--percentiles", "50,95"),
            *("--save-detailed", str(log), "--plot-timeline", str(plot)),
            out=tmp_path,
        )
    assert status == 0, said + errors
    assert "ray: no greedy answer was compared" in said
    # Into a pipe the widest table is whole.
    assert "good requests/s" in said and "…" not in said
    sampling = generator.requests[-1].sampling
    assert (sampling.temperature, sampling.top_k) == (0.5, 7)
    assert "ray, 2 at once, ITL" in said
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(records) == 2 * 4
    for one in records:
        assert (one["output_tokens"], len(one["itls"]), one["error"]) == (8, 7, "")
        assert one["ttft"] > 0 and one["start"] >= one["due"] >= 0 and one["cached_tokens"] is None
    assert plot.read_bytes().startswith(b"\x89PNG")
    found = data_of(tmp_path, "serving")
    assert found["results"][0].keys() >= {"p50_ttft_ms", "p95_e2el_ms"} - {"p99_ttft_ms"}
    assert found["results"][0]["total_cached_tokens"] is None
    assert found["options"]["header"] == ["Authorization"] and "secret" not in json.dumps(found)


@pytest.mark.parametrize(
    ("of_target", "of_reference", "status", "says"),
    [
        pytest.param(
            *(1000, 3, 0, ("the reference failed", "planted")),
            id="reference",
            marks=pytest.mark.long,
        ),
        pytest.param(*(4, 1000, 0, ("INCOMPLETE", "of 8 requests failed: ", "planted")), id="some"),
        pytest.param(
            *(1, 1000, 1, ("8 of 8 requests failed", "no request was answered")),
            id="all",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_errors_are_counted_and_the_figures_come_all_the_same(
    told: ServedModel,
    tmp_path: Path,
    *,
    of_target: int,
    of_reference: int,
    status: int,
    says: tuple[str, ...],
) -> None:
    target, reference = failing(of_target), failing(of_reference)
    async with running(target, told) as url, running(reference, told) as other:
        ended, said, errors = await run(
            *("serving", "--target", f"it={url}", "--reference", other, *SERVING), out=tmp_path
        )
    assert ended == status, said + errors
    assert all(each in said + errors for each in says), said + errors
    assert ("Rows for benchmarks/pages" in said) is (status == 0)
    assert len(data_of(tmp_path, "serving")["results"]) == 2


async def test_two_targets_replay_a_trace_and_untold_hits_are_not_zero(
    told: ServedModel, silent: ServedModel, tmp_path: Path
) -> None:
    trace = tmp_path / "azure.csv"
    rows = [f"2023-11-16 18:15:{second:02}.6805900,{50 + second},9" for second in range(5)]
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows]))
    one, other = ScriptedGenerator(SCRIPT), ScriptedGenerator(SCRIPT)
    async with running(one, told) as on, running(other, silent) as off:
        status, said, errors = await run(
            *("serving.replay", str(trace), "--target", f"on={on}", "--target", f"off={off}"),
            *("--span", "0.2"),
            out=tmp_path,
        )
    assert status == 0, said + errors
    row = {line.split(" | ")[1]: line for line in said.splitlines() if line.startswith("| 2")}
    # The double tells 3 cached tokens of each prompt, of 260 in all.
    assert row[f"{trace}, on"].split(" | ")[2:7] == ["5", "0", "0.0%", "5.8%", "not told"]
    assert row[f"{trace}, off"].split(" | ")[5:7] == ["not told", "not told"]
    assert "not told" in row["on / off"] and "on: 5 of 5 greedy answers equal" in said
    salts = {request.cache_salt for request in one.requests[1:]}
    assert len(salts) == 1 and salts.isdisjoint(request.cache_salt for request in other.requests)


def test_two_clusters_converse_in_turn_and_are_compared(
    served: ServedCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ConversationOptions(
        target=(f"on={served.proxy.url}", f"off={served.d.url}"),
        api_key=API_KEY,
        users=2,
        turns=2,
        rounds=2,
        think=0.01,
        random_prefix_len=8,
        random_input_len=24,
        added_len=8,
        output_len=4,
        out=str(tmp_path),
    )
    with pytest.raises(Exit) as ended:
        converse(lambda: options)
    said = capsys.readouterr().out
    assert ended.value.exit_code == 0, said
    assert "on: 8 of 8 greedy answers equal" in said and "the nodes' counters are not read" in said
    turns = data_of(tmp_path, "conversation")["turns"]
    assert [(one["prompt"], one["new"]) for one in turns["on"]] == [(32, 32), (44, 8)]
    assert [one["pulled"] > 0 for one in turns["on"]] == [True, True]
    # One node alone hands nothing over, so that it has nothing to tell of.
    assert [one["decode_hit"] for one in turns["off"]] == [None, None]
    (ratios,) = [
        line for line in said.splitlines() if line.startswith("| 2") and "on / off" in line
    ]
    assert ratios.count("(") == 3 and ratios.count("not told") == 2


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("--percentiles", "50,x"), "--percentiles 50,x: write numbers up to 100"),
        (("--extra-body", "[1]"), "--extra-body must be a JSON object"),
        (("--header", "X-Key"), "--header 'X-Key': write NAME=VALUE"),
        (("--save-detailed", "absent/log.jsonl"), "absent is not a folder"),
        (("--temperature", "-1"), "temperature"),
    ],
)
def test_a_wrong_option_is_one_line(tmp_path: Path, words: tuple[str, ...], problem: str) -> None:
    app = command_app(ConversationOptions, converse, PURPOSE)
    done = CliRunner().invoke(app, ["--out", str(tmp_path), *words])
    assert done.exit_code == 2 and re.fullmatch(r"error: .*\n", done.stderr)
    assert problem in done.stderr
