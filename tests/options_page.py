"""`python -m tests.options_page`: writes docs/options.md and docs/cluster-file.md with its schema.

Every option of a node and the proxy, and every key of a cluster file, from their structs.
"""

import re
from collections.abc import Iterable
from typing import Any

from msgspec import NODEFAULT, inspect, json

from connector.multi.connector import MultiConnectorConfig
from connector.offload.config import OffloadConfig
from connector.pd.config import PdConnectorConfig
from deploy.config import (
    ClusterConfig,
    DecodeGroup,
    DecodeScaling,
    Group,
    PrefillGroup,
    PrefillScaling,
    ProxyGroup,
    Scaling,
)
from proxy.config import ProxyConfig
from serving.config import Config, KVEventsConfig, KVTransferConfig, NodeConfig, ServerConfig
from serving.vllm_flags import ANY_VALUE, ONLY, REFUSED, SWITCHES
from tests.source_tree import ROOT

Sections = tuple[tuple[str, str, type[Config]], ...]

OPTIONS = ROOT / "docs" / "options.md"
CLUSTER_FILE = ROOT / "docs" / "cluster-file.md"
CLUSTER_SCHEMA = ROOT / "docs" / "cluster.schema.json"
OPTIONS_HEAD = """# Options

Every option of `tandem prefill`, `tandem decode` and `tandem proxy`. `make tree` writes this page
from the structs in which they stand, and so does `--help`. [operations.md](operations.md) says when
to use them.

Flags win over the YAML file of `--config FILE`, whose keys are the flags' names, with - or _. A
switch takes `--name` or `--no-name`. A flag that may be repeated also takes one JSON list. A number
of seconds is at most 86,400.
"""
OPTIONS_SECTIONS: Sections = (
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
CLUSTER_HEAD = """# The cluster file

One YAML file is a whole cluster. `make tree` writes this page from `deploy/config.py`. The folder
`deploy/configs` has examples.
[operations.md](operations.md) starts a cluster from one, [kubernetes.md](kubernetes.md) renders
manifests.

```yaml
# yaml-language-server: $schema=cluster.schema.json
model: /models/Qwen3.5-4B
config: {kv_cache_memory_bytes: 8589934592, served_model_name: [qwen]}
prefill: {replicas: 2}
decode: {replicas: 1, config: {max_num_seqs: 128}}
proxy: {config: {port: 8000}}
```

The first line lets an editor complete and check the file with
[cluster.schema.json](cluster.schema.json). An unknown key, or one that is there twice, is an error
that names its line.
"""
CLUSTER_SECTIONS: Sections = (
    ("The file", "", ClusterConfig),
    ("Every group", "Keys of `prefill`, `decode` and `proxy`.", Group),
    ("prefill", "Beside those of every group.", PrefillGroup),
    ("decode", "Beside those of every group.", DecodeGroup),
    ("proxy", "Beside those of every group.", ProxyGroup),
    ("autoscaling", "Of `prefill` and `decode`; without it their number stays.", Scaling),
    ("prefill.autoscaling", "Beside these.", PrefillScaling),
    ("decode.autoscaling", "Beside these.", DecodeScaling),
)
SECONDS = 86_400.0
KINDS = {
    inspect.BoolType: "switch",
    inspect.IntType: "number",
    inspect.FloatType: "number",
    inspect.StrType: "text",
    inspect.DictType: "object",
    inspect.StructType: "object",
}


def options_page() -> str:
    """The text of docs/options.md."""
    return OPTIONS_HEAD + _tables(OPTIONS_SECTIONS) + _flags_of_vllm()


def cluster_page() -> str:
    """The text of docs/cluster-file.md."""
    return CLUSTER_HEAD + _tables(CLUSTER_SECTIONS)


def cluster_schema() -> str:
    """JSON schema of a cluster file, in which each `config` has the options of its members."""
    kinds = (ClusterConfig, NodeConfig, ProxyConfig)
    (whole, *_), structs = json.schema_components(kinds, ref_template="#/$defs/{name}")
    options = {"PrefillGroup": NodeConfig, "DecodeGroup": NodeConfig, "ClusterConfig": NodeConfig}
    for name, kind in {**options, "ProxyGroup": ProxyConfig}.items():
        told: dict[str, Any] = structs[name]["properties"]["config"]
        structs[name]["properties"]["config"] = {
            "description": told["description"],
            "$ref": f"#/$defs/{kind.__name__}",
        }
    dialect = "https://json-schema.org/draft/2020-12/schema"
    page = {"$schema": dialect, "title": "Cluster file of Tandem", **whole, "$defs": structs}
    text = json.format(json.encode(page, order="deterministic"), indent=1).decode() + "\n"
    # `typing` holds a bound of 0 and one of 0.0 for one, and keeps whichever it has met first.
    return re.sub(r"(?<=: )(-?\d+)\.0(?=[,\n])", r"\1", text)


def _tables(sections: Sections) -> str:
    text = ""
    told: set[type] = set()
    for title, note, kind in sections:
        head = ["| option | takes | default | |", "| --- | --- | --- | --- |"]
        rows = [_row(field, kind) for field in _fields(kind) if not _is_of_base(field, kind, told)]
        text += "\n".join([f"\n## {title}\n", *([f"{note}\n"] if note else []), *head, *rows, ""])
        told.add(kind)
    return text


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


def _is_of_base(field: inspect.Field, kind: type[Config], told: set[type]) -> bool:
    """True for a field of a base, with the same default, that an earlier table has."""
    return any(
        field == other for base in kind.__mro__[1:] if base in told for other in _fields(base)
    )


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
    CLUSTER_FILE.write_text(cluster_page())
    CLUSTER_SCHEMA.write_text(cluster_schema())
