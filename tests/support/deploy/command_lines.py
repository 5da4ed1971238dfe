"""Command lines of documents and manifests, read as their programs read them."""

import argparse
import runpy
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
    """Ends a program that has parsed its arguments with argparse; holds them."""


def parsed(module: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options that the program of `module` reads from `words`; raises its error for wrong ones."""
    # A program that parses its arguments in no way known here would run.
    assert (ROOT / module.partition(".")[0]).is_dir()
    apps: list[typer.Typer] = []
    # Instead of running, the program leaves its parser here.
    monkeypatch.setattr(typer.Typer, "__call__", lambda app: apps.append(app))
    parse = argparse.ArgumentParser.parse_args

    def end(parser: argparse.ArgumentParser) -> None:
        raise ParsedError(parse(parser, words))

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", end)
    try:
        runpy.run_module(module, run_name="__main__")
    except ParsedError as ended:
        return dict(vars(ended.args[0]))
    command: Any = get_command(apps[0])
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
