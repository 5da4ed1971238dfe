"""Command lines of config structs: one flag for each field."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import Parameter, Signature
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer
from msgspec import inspect
from typer.core import TyperCommand

from engine.errors import ConfigError
from serving.config import Config, ConfigT, NodeConfig, ServerConfigT, load_config
from serving.process import Server, configure_logging, run_server
from serving.vllm_flags import without_vllm_flags

log = structlog.get_logger()

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
    """A typer app with one command, which runs a server; `defaults` win over those of `kind`.

    Its command line may have flags of vLLM, too: those without effect are logged.
    """
    ignored: list[str] = []

    class ServerCommand(TyperCommand):
        def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
            fields = _fields(kind)
            try:
                args, others = without_vllm_flags(args, {*_flags_of(fields.values())})
            except ConfigError as error:
                raise typer.BadParameter(str(error), ctx=ctx) from None
            ignored[:] = others
            return super().parse_args(ctx, _one_value_per_flag(args, fields))

    def run(load: Callable[[], ServerConfigT]) -> None:
        def make() -> Server:
            config = load()
            configure_logging(config.log_level)
            if ignored:
                log.warning("flags of vLLM have no effect here", flags=ignored)
            return make_server(config)

        run_server(make)

    return command_app(kind, run, purpose, command_class=ServerCommand, **defaults)


def command_app(
    kind: type[ConfigT],
    command: Callable[[Callable[[], ConfigT]], None],
    purpose: str,
    *,
    command_class: type[TyperCommand] = TyperCommand,
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
        Parameter(
            name,
            Parameter.KEYWORD_ONLY,
            default=_info(field, _shown(defaults.get(name, field.default)), None),
            annotation=_flag_type(_kind(field)) | None,
        )
        for name, field in fields.items()
    ]
    # typer makes the flags of a function's signature.
    config = Parameter("config", Parameter.KEYWORD_ONLY, default=None, annotation=ConfigFile)
    run.__signature__ = Signature([*parameters, config])  # type: ignore[attr-defined]
    # Without rich's markup, which takes [words] in brackets for styles and cuts long flags short.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(cls=command_class, help=purpose)(run)
    return app


def option(kind: type[Config], name: str) -> Any:
    """The flag of a field of `kind`, for a program that is not a server."""
    return _info(_fields(kind)[name])


def _fields(kind: type[Config]) -> dict[str, inspect.Field]:
    told = inspect.type_info(kind)
    assert isinstance(told, inspect.StructType)
    return {field.name: field for field in told.fields}


def _kind(field: inspect.Field) -> inspect.Type:
    """The type of a field that is there: that of `X | None` is X."""
    kind = field.type.type if isinstance(field.type, inspect.Metadata) else field.type
    return kind.types[0] if isinstance(kind, inspect.UnionType) else kind


def _flags_of(fields: Iterable[inspect.Field]) -> list[str]:
    return [f"--{field.encode_name.replace('_', '-')}" for field in fields]


def _one_value_per_flag(words: Sequence[str], fields: Mapping[str, inspect.Field]) -> list[str]:
    """The words with `--flag a b`, as vLLM takes lists, written as `--flag a --flag b`.

    If no other word is the command's argument, the last one of such a list is.
    """
    flags = dict(zip(_flags_of(fields.values()), map(_kind, fields.values()), strict=True))
    lists = {flag for flag, kind in flags.items() if isinstance(kind, inspect.VarTupleType)}
    switches = {flag for flag, kind in flags.items() if isinstance(kind, inspect.BoolType)}
    takes_one = flags.keys() - switches - lists | {"--config"}
    groups: list[list[str]] = []  # a flag and its values, or a word of no flag
    for word in words:
        flag, num_values = (groups[-1][0], len(groups[-1]) - 1) if groups else ("", 0)
        takes_first = flag in takes_one | lists and num_values == 0
        if takes_first or (flag in lists and not word.startswith("-")):
            groups[-1].append(word)
        else:
            groups.append([word])
    has_argument = any("argument" in _extra(field) for field in fields.values())
    if has_argument and all(group[0].startswith("-") for group in groups):
        long = [group for group in groups if len(group) > 2]
        groups += [[long[-1].pop()]] if long else []
    made: list[str] = []
    for flag, *values in groups:
        made += chain.from_iterable((flag, value) for value in values) if values else [flag]
    return made


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
