"""Commands that documents tell a reader to type: each is one that its program takes."""

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command

from deploy.command import app
from deploy.config import load_cluster
from deploy.demo.__main__ import EXAMPLES, NAME
from serving.api.schema import CompletionRequest
from serving.config import NodeConfig, load_config
from tests.source_tree import ROOT, listed
from tests.support.deploy.command_lines import config_of

QUICK_S = 300
# Of the tree, docstrings tell.
PAGES = [page for page in listed(ROOT, deep=True) if page.suffix == ".md" and page.stem != "TREE"]
# In a fence, in an indented block, or between backticks. A backslash goes on in the next line.
COMMAND = re.compile(
    r"^ {0,4}((?:tandem|python -m) (?:[^\n]*\\\n)*[^\n']*(?:'[^']*'[^\n']*)*)$"
    r"|`((?:tandem|python -m) [^`\n]+)`",
    re.M,
)


def commands(page: str) -> Iterator[str]:
    """Of `tandem` itself, without a command's name, there is nothing to run."""
    for shell, inline in COMMAND.findall(page):
        # What a page says of a command stands after three spaces, where JSON has none.
        text = re.split(r" {3,}[^\s{\"]", re.sub(r"\\\n *", "", shell or inline))[0]
        if not text.startswith(("tandem --", "tandem COMMAND")):
            yield text


COMMANDS = sorted({text for page in PAGES for text in commands(page.read_text())})


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
@pytest.mark.parametrize("text", COMMANDS)
def test_every_command_of_a_document_is_taken(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Documents export it before the commands that need it.
    monkeypatch.setenv("TANDEM_CLUSTER_TOKEN", "of a document")
    config_of(shlex.split(text), monkeypatch)


def test_what_stands_around_the_commands_is_there(tmp_path: Path) -> None:
    texts = {page: page.read_text() for page in PAGES}
    named = {name for text in texts.values() for name in re.findall(r"`make ([a-z-]+)`", text)}
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert len(named) > 5 and named <= targets
    own = {flag for option in get_command(app).params for flag in option.opts}
    told = {flag for text in texts.values() for flag in re.findall(r"`tandem (--[a-z-]+)`", text)}
    assert "--install-completion" in told and told <= own | {"--help"}
    given = [it for text in texts.values() for it in re.findall(r"--([a-z-]+) '({[^']*})'", text)]
    assert len(given) > 2
    for name, value in given:
        load_config(NodeConfig, None, {"model": "m", name.replace("-", "_"): value})
    page = texts[ROOT / "docs" / "operations.md"]
    file = tmp_path / "cluster.yaml"
    file.write_text(re.findall(r"```yaml\n(model:.*?)```", page, re.DOTALL)[0])
    assert load_cluster(file).prefill.replicas == 2
    # The page asks as `tandem serve` says.
    body = re.findall(r"^  -d '(.*)'$", page, re.M)[0]
    asked = msgspec.json.decode(body, type=CompletionRequest, strict=True)
    assert body in EXAMPLES.format(url="", name=NAME, question="") and asked.temperature == 0


@pytest.mark.long
@pytest.mark.timeout(QUICK_S + 30)
def test_the_policies_of_a_trace_are_compared(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    # A quarter of what they need holds two blocks of 512 tokens and more.
    rows = [
        {
            "timestamp": 100 * n,
            "input_length": 4096,
            "output_length": 16,
            "hash_ids": [0, *range(7 * n + 1, 7 * n + 8)],
        }
        for n in range(24)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["policies", "--trace", str(trace), "--quick", "--scale", "1", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.cache", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=QUICK_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
