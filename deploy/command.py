"""`tandem COMMAND`: every program of the project under one name, with its own options and help."""

import runpy
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import Annotated, NamedTuple

import typer

from engine.distribution import VERSION, how_to_install


class Program(NamedTuple):
    """`python -m MODULE ARGUMENTS`, and what it needs beside Tandem: packages of an `extra`."""

    module: str
    help: str
    arguments: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    extra: str = ""


def _of_ray(name: str, text: str) -> Program:
    """A command of `python -m deploy` that needs Ray."""
    return Program("deploy", text, (name,), ("ray",), "ray")


PROGRAMS: Mapping[str, Program] = MappingProxyType(
    {
        "serve": Program(
            "deploy.demo",
            "Keep the demo cluster up: a small model on one P, one D, a proxy.",
            ("--keep",),
            ("ray", "openai"),
            "demo",
        ),
        "prefill": Program("prefill_node", "Run a prefill node."),
        "decode": Program("decode_node", "Run a decode node."),
        "proxy": Program("proxy", "Run the proxy in front of nodes."),
        "register": Program("proxy.register", "Make a worker of vLLM or SGLang known to proxies."),
        "up": _of_ray("up", "Start a Ray on this machine with the cluster of a YAML file."),
        "apply": _of_ray("apply", "Bring a cluster on a running Ray to what its file says."),
        "plan": _of_ray("plan", "Show where its members would be, and what their arenas hold."),
        "status": _of_ray("status", "Show its members beside what is wanted."),
        "scale": _of_ray("scale", "Change how many members a role has."),
        "drain": _of_ray("drain", "Let a member finish what it has and end."),
        "restart": _of_ray("restart", "Replace members one after the other."),
        "logs": _of_ray("logs", "Show the end of a member's log."),
        "down": _of_ray("down", "Stop it."),
        "render": Program("deploy", "Write a cluster file as manifests.", ("render",)),
        "doctor": Program("connector.doctor", "Check two nodes before traffic."),
        "arena": Program("serving.show_plan", "Show how an arena would be cut for a model."),
    }
)
NAME = "tandem"
PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True}

app = typer.Typer(
    pretty_exceptions_enable=False,
    help="Serve hybrid language models from prefill and decode nodes. "
    f"`{NAME} COMMAND --help` lists a command's options.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"{NAME} {VERSION}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def print_help(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", is_eager=True, callback=_print_version),
    ] = False,
) -> None:
    """Shows what there is to one who names no command."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def run_program(context: typer.Context) -> None:
    """As `python -m` would, in this process; imports nothing that the program does not need."""
    name = context.info_name or ""
    program = PROGRAMS[name]
    missing = [package for package in program.packages if find_spec(package) is None]
    if missing and "--help" not in context.args:
        install = how_to_install(program.extra)
        typer.echo(f"error: {NAME} {name} needs {', '.join(missing)}: {install}", err=True)
        raise typer.Exit(2)
    # A command of a group adds its own name to the usage that `--help` shows.
    is_in_group = name in program.arguments
    sys.argv = [NAME if is_in_group else f"{NAME} {name}", *program.arguments, *context.args]
    runpy.run_module(program.module, run_name="__main__")


for _name, _program in PROGRAMS.items():
    app.command(_name, help=_program.help, context_settings=dict(PASSED_ON), add_help_option=False)(
        run_program
    )
