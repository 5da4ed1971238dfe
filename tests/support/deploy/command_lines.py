"""Command lines of documents and manifests, read as their programs read them."""

import argparse
import runpy
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from connector.registry import builder_of
from deploy.command import PROGRAMS
from proxy.config import ProxyConfig
from serving.config import NodeConfig, ServerConfig, load_config
from tests.source_tree import ROOT

CONFIGS: dict[str, type[ServerConfig]] = {
    "prefill_node": NodeConfig,
    "decode_node": NodeConfig,
    "proxy": ProxyConfig,
}


def program_of(words: Sequence[str]) -> tuple[str, list[str]]:
    """The module that runs, and its arguments."""
    if words[0] == "python":
        return words[2], [*words[3:]]
    program = PROGRAMS[words[1]]
    return program.module, [*program.arguments, *words[2:]]


class ParsedError(Exception):
    """Ends a program in place of its work; holds its parsed arguments, or its `typer.Typer`."""


def parsed(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options that the program of `module` reads from `words`; raises its error for wrong ones."""
    # A program that parses its arguments in no way known here would run.
    assert (ROOT / module.partition(".")[0]).is_dir()
    parse = argparse.ArgumentParser.parse_args

    def end(program: typer.Typer | argparse.ArgumentParser) -> None:
        raise ParsedError(program if isinstance(program, typer.Typer) else parse(program, words))

    monkeypatch.setattr(typer.Typer, "__call__", end)
    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", end)
    # Signals of the test's own process stay as they are.
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    with pytest.raises(ParsedError) as ended:
        runpy.run_module(module, run_name="__main__")
    found = ended.value.args[0]
    if isinstance(found, argparse.Namespace):
        return dict(vars(found))
    command: Any = get_command(found)
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    # click empties the list that it reads.
    return dict(command.make_context(module, [*words]).params)


def config_of(words: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> ServerConfig | None:
    """The options with which a server would start; None for another program, or a bare name."""
    module, arguments = program_of(words)
    options = parsed(module, arguments, monkeypatch)
    if not arguments or not (kind := CONFIGS.get(module)):
        return None
    given = {name: value for name, value in options.items() if value not in (None, [], ())}
    file: Path | None = given.pop("config", None)
    config = load_config(kind, file, given)
    if isinstance(config, NodeConfig):
        builder_of(config.kv_transfer_config)
    return config
