"""`python -m tests.options_page`: writes docs/options.md, every option of a node and the proxy."""

from collections.abc import Iterable, Iterator
from textwrap import dedent

from msgspec import NODEFAULT, inspect

from connector.multi.connector import MultiConnectorConfig
from connector.offload.config import OffloadConfig
from connector.pd.config import PdConnectorConfig
from proxy.config import ProxyConfig
from serving.config import Config, KVEventsConfig, KVTransferConfig, NodeConfig, ServerConfig
from serving.vllm_flags import ANY_VALUE, ONLY, REFUSED, SWITCHES
from tests.source_tree import ROOT

OPTIONS = ROOT / "docs" / "options.md"
HEAD = """# Options

Every option of `tandem prefill`, `tandem decode` and `tandem proxy`. `make tree` writes this page
from the structs in which they stand, and so does `--help`. [operations.md](operations.md) says when
to use them.

Flags win over the YAML file of `--config FILE`, whose keys are the flags' names, with - or _. A
switch takes `--name` or `--no-name`. A flag that may be repeated also takes one JSON list. A number
of seconds is at most 86,400.
"""
SECTIONS: tuple[tuple[str, str, type[Config]], ...] = (
    ("Nodes and proxy", "The port of a prefill node is 8100, of a decode node 8200.", ServerConfig),
    ("Nodes", "Beside these. `MODEL` is the first argument.", NodeConfig),
    ("Proxy", "Beside those of both.", ProxyConfig),
    (
        "--kv-transfer-config",
        'A JSON object, as `{"kv_connector": "PdConnector"}`.',
        KVTransferConfig,
    ),
    (
        "kv_connector_extra_config of PdConnector",
        'What happens at each limit: [operations.md](operations.md), "Limits of a hand-over".',
        PdConnectorConfig,
    ),
    (
        "kv_connector_extra_config of OffloadConnector",
        "At least one tier; `disk_path` and `disk_bytes` go together.",
        OffloadConfig,
    ),
    ("kv_connector_extra_config of MultiConnector", "", MultiConnectorConfig),
    (
        "--kv-events-config",
        'A JSON object, as `{"enable_kv_cache_events": true}`.',
        KVEventsConfig,
    ),
)
SECONDS = 86_400.0
KINDS = {
    inspect.BoolType: "switch",
    inspect.IntType: "number",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.DictType: "object",
    inspect.StructType: "JSON",
}


def options_page() -> str:
    """The text of docs/options.md."""
    text = HEAD
    for title, note, kind in SECTIONS:
        head = ["| option | takes | default | |", "| --- | --- | --- | --- |"]
        rows = [_row(field, kind) for field in _own_fields(kind)]
        text += "\n".join([f"\n## {title}\n", *([f"{note}\n"] if note else []), *head, *rows, ""])
    return dedent(text) + _flags_of_vllm()


def _flags_of_vllm() -> str:
    """Flags that command lines of `vllm serve` may bring along, and what they may not."""
    rows = [
        *((flag, "", "no effect") for flag in sorted(SWITCHES)),
        *((flag, "any value", "no effect") for flag in sorted(ANY_VALUE)),
        *((flag, _words(ONLY[flag]), "no effect; refused with others") for flag in sorted(ONLY)),
        *((flag, "", f"refused: {REFUSED[flag]}") for flag in sorted(REFUSED)),
    ]
    head = ["| flag | takes | |", "| --- | --- | --- |"]
    lines = [f"| `{flag}` | {takes} | {note} |" for flag, takes, note in rows]
    return "\n".join(
        ["\n## Flags of `vllm serve`\n", "Unless they stand above.\n", *head, *lines, ""]
    )


def _words(values: Iterable[str]) -> str:
    return ", ".join(f"`{value}`" for value in values)


def _own_fields(kind: type[Config]) -> Iterator[inspect.Field]:
    """Of a server those that it does not share with the other one."""
    shared = () if kind is ServerConfig else ServerConfig.__struct_fields__
    for field in _fields(kind):
        if not (issubclass(kind, ServerConfig) and field.name in shared):
            yield field


def _fields(kind: type[Config]) -> Iterable[inspect.Field]:
    told = inspect.type_info(kind)
    assert isinstance(told, inspect.StructType)
    return told.fields


def _row(field: inspect.Field, kind: type[Config]) -> str:
    told = field.type
    assert isinstance(told, inspect.Metadata) and told.extra_json_schema, f"{field.name}: no help"
    extra = told.extra or {}
    name = field.name
    if issubclass(kind, ServerConfig):
        name = name.upper() if "argument" in extra else "--" + name.replace("_", "-")
    help_text = str(told.extra_json_schema["description"])
    if "envvar" in extra:
        help_text += f" Also by the variable {extra['envvar']}."
    cells = (f"`{name}`", _takes(told), _default(field), help_text.replace("|", "\\|"))
    return f"| {' | '.join(cells)} |"


def _takes(told: inspect.Type) -> str:
    """Values that may be given: words, or a kind of value with its bounds."""
    while isinstance(told, inspect.Metadata):
        told = told.type
    if isinstance(told, inspect.UnionType):
        kinds = [each for each in told.types if not isinstance(each, inspect.NoneType)]
        return " or ".join(_takes(each) for each in kinds)
    if isinstance(told, inspect.LiteralType):
        return _words(map(str, told.values))
    if isinstance(told, inspect.VarTupleType):
        return f"{_takes(told.item_type)}, repeated"
    if isinstance(told, inspect.FloatType) and told.le == SECONDS:
        return "seconds"
    return f"{KINDS[type(told)]}{_bounds(told)}"


def _bounds(told: inspect.Type) -> str:
    if not isinstance(told, inspect.IntType | inspect.FloatType):
        return ""
    lowest = told.ge if told.ge is not None else told.gt
    above = "above " if told.ge is None and told.gt is not None else ""
    if told.le is not None and lowest is not None:
        return f", {above}{_exact(lowest)} to {_exact(told.le)}"
    return "" if lowest is None else f", {above}{_exact(lowest)} or more"


def _default(field: inspect.Field) -> str:
    value = field.default
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int | float):
        return _exact(value)
    if isinstance(value, str) and value:
        return f"`{value}`"
    # None, an empty text or list, a struct of defaults: the help says what they mean.
    return "needed" if value is NODEFAULT and field.required else ""


def _exact(number: float) -> str:
    return f"{int(number)}" if number == int(number) else f"{number:g}"


if __name__ == "__main__":
    OPTIONS.write_text(options_page())
