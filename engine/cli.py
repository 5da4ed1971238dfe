"""Command lines of config structs: one flag for each field."""

import os
from collections.abc import Callable, Mapping
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import inspect

from engine.config import Config, ConfigT, NodeConfig, ServerConfigT, load_config
from engine.process import Server, configure_logging, run_server

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="YAML whose keys are these flags; flags win.")
]
# What typer parses of a flag. Anything else stays text for `load_config`, which knows the bounds.
FLAG_TYPES: Mapping[type[inspect.Type], type] = {
    inspect.BoolType: bool,
    inspect.FloatType: float,
    inspect.IntType: int,
}


def node_app(
    kind: str, default_port: int, make_server: Callable[[NodeConfig], Server]
) -> typer.Typer:
    """A typer app with one command, which runs a `kind` node."""
    purpose = (
        f"Run a Tandem {kind} node: an OpenAI-compatible server that can also hand prefills over "
        "to, or take them from, other nodes."
    )
    return server_app(NodeConfig, make_server, purpose, port=default_port)


def server_app(
    kind: type[ServerConfigT],
    make_server: Callable[[ServerConfigT], Server],
    purpose: str,
    **defaults: object,
) -> typer.Typer:
    """A typer app with one command, which runs a server; `defaults` win over those of `kind`."""

    def run(load: Callable[[], ServerConfigT]) -> None:
        def make() -> Server:
            config = load()
            configure_logging(config.log_level)
            return make_server(config)

        run_server(make)

    return command_app(kind, run, purpose, **defaults)


def command_app(
    kind: type[ConfigT],
    command: Callable[[Callable[[], ConfigT]], None],
    purpose: str,
    **defaults: object,
) -> typer.Typer:
    """A typer app with one command, which gets what loads its options, or raises ConfigError."""
    fields = _fields(kind)

    def run(config: Path | None, **flags: Any) -> None:
        given = {name: value for name, value in flags.items() if value not in (None, [])}
        for name, field in fields.items():
            # An empty variable is none for click. Here it is an empty value: a secret that got
            # lost on its way must not open a server.
            variable = _extra(field).get("envvar")
            if variable and os.environ.get(variable) == "":
                given.setdefault(name, "")
        command(lambda: load_config(kind, config, given, defaults=defaults))

    parameters = [
        _parameter(field, defaults.get(name, field.default)) for name, field in fields.items()
    ]
    # typer makes the flags of a function's signature.
    config = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
    run.__signature__ = Signature([*parameters, config])  # type: ignore[attr-defined]
    # Without rich's markup, which takes [words] in brackets for styles and cuts long flags short.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=purpose)(run)
    return app


def option(kind: type[Config], name: str) -> Any:
    """The flag of a field of `kind`, for a program that is not a server."""
    return _info(_fields(kind)[name])


def _fields(kind: type[Config]) -> dict[str, inspect.Field]:
    told = inspect.type_info(kind)
    assert isinstance(told, inspect.StructType)
    return {field.name: field for field in told.fields}


def _parameter(field: inspect.Field, default: object) -> Parameter:
    kind = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
    if isinstance(kind, inspect.UnionType):  # `X | None`
        kind = kind.types[0]
    return Parameter(
        field.name,
        Parameter.KEYWORD_ONLY,
        default=_info(field, _shown(default), None),
        annotation=_flag_type(kind) | None,
    )


def _flag_type(kind: inspect.Type) -> Any:
    if isinstance(kind, inspect.VarTupleType):
        item = kind.item_type
        return list[_flag_type(item.type if isinstance(item, inspect.Metadata) else item)]  # type: ignore[misc]
    return FLAG_TYPES.get(type(kind), str)


def _info(field: inspect.Field, shown: str = "", default: Any = ...) -> Any:
    told = field.type
    assert isinstance(told, inspect.Metadata) and told.extra_json_schema, f"{field.name}: no help"
    text = told.extra_json_schema["description"] + shown
    if "argument" in _extra(field):
        return typer.Argument(default, help=text)
    return typer.Option(default, help=text, envvar=_extra(field).get("envvar"))


def _extra(field: inspect.Field) -> dict[str, Any]:
    return (isinstance(field.type, inspect.Metadata) and field.type.extra) or {}


def _shown(default: object) -> str:
    """The end of a help text; a default that takes words has them in the description."""
    if isinstance(default, bool):
        return " [yes]" if default else " [no]"
    if isinstance(default, float):
        return f" [{default:g}]"
    return f" [{default}]" if isinstance(default, int | str) and default != "" else ""
