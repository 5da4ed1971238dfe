"""Commands that documents tell a reader to type: each names a program and flags that exist."""

import json
import re
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from deploy.command import PROGRAMS
from tests.source_tree import ROOT

HELP_S = 120
QUICK_S = 300
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "TREE.md"),
    *sorted((ROOT / "benchmarks").rglob("*.md")),
]
# In a fence, in an indented block, or between backticks; a backslash goes on in the next line.
COMMAND = re.compile(
    r"^ {0,4}((?:tandem|python -m) (?:.*\\\n)*.*)$|`((?:tandem|python -m) [^`\n]+)`", re.M
)
# Read by the shell and by typer before there is a program.
OF_TANDEM = {"COMMAND", "--help", "--version", "--install-completion"}


@cache
def programs() -> dict[tuple[str, ...], set[str]]:
    """Every program of a document, as the words after `python -m`, with the flags it is given."""
    found: dict[tuple[str, ...], set[str]] = defaultdict(set)
    for page in PAGES:
        for text in commands(page.read_text()):
            program, flags = parsed(text)
            found[program] |= flags
    return dict(found)


def commands(page: str) -> Iterator[str]:
    for shell, inline in COMMAND.findall(page):
        # What a page says of a command stands after three spaces.
        yield re.split(r" {3,}\S", re.sub(r"\\\n *", "", shell or inline))[0]


def parsed(text: str) -> tuple[tuple[str, ...], set[str]]:
    words = re.sub(r"'.*", "", text).split() if text.count("'") % 2 else shlex.split(text)
    if words[0] == "tandem":
        name = words[1]
        if name in OF_TANDEM:
            return ("deploy.command",), set()
        program = PROGRAMS[name]
        start = (program.module, *(word for word in program.arguments if word[0] != "-"))
        words = words[2:]
    else:
        start, words = (words[2],), words[3:]
        # Groups of commands have a name before the flags.
        if start[0] in ("benchmarks.kv_cache", "benchmarks.models", "deploy") and words:
            start, words = (*start, words[0]), words[1:]
    flags = {word.partition("=")[0].rstrip(",;.") for word in words if word.startswith("--")}
    return start, flags - {"--"}


def test_every_command_of_a_document_names_a_program() -> None:
    assert len(programs()) > 20
    assert [name for name, *_ in programs() if find_spec(name) is None] == []


@pytest.mark.long
@pytest.mark.timeout(HELP_S + 30)
@pytest.mark.parametrize("program", programs(), ids=" ".join)
def test_every_flag_of_a_document_is_one_of_the_program(program: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *program, "--help"],
        cwd=ROOT, capture_output=True, text=True, timeout=HELP_S, check=False,
        env={"COLUMNS": "400", "PATH": "", "NO_COLOR": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    known = set(re.findall(r"--[a-z][a-z0-9-]*", done.stdout))
    assert programs()[program] - known == set()


@pytest.mark.long
@pytest.mark.timeout(QUICK_S + 30)
def test_the_policies_of_a_trace_are_compared(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    rows = [
        {
            "timestamp": 100 * n,
            "input_length": 1024,
            "output_length": 16,
            "hash_ids": [0, n % 3 + 1],
        }
        for n in range(12)
    ]
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["policies", "--trace", str(trace), "--quick", "--out", str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.kv_cache", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=QUICK_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
