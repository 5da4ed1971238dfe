"""What the JSON schema of a tool's arguments says of one value, local references followed."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from types import NoneType
from typing import Any, Final
from urllib.parse import unquote

MAX_HOPS: Final = 16
MAX_PARTS: Final = 256
MAX_REFERENCE_CHARS: Final = 1024

_DEFINITIONS: Final = ("$defs", "definitions")
_NAMES: Final[Mapping[type, str]] = {
    **{str: "string", int: "integer", float: "number", bool: "boolean"},
    **{NoneType: "null", list: "array", dict: "object"},
}


def lookup(schema: object, root: Mapping[str, Any], key: str) -> Any:
    """The key's value, of the schema or of the first that its references lead to; None without.

    `root` has the definitions. A schema with one `allOf` alone refers to it, as Pydantic writes.
    """
    for _ in range(MAX_HOPS):
        if not isinstance(schema, Mapping):
            return None
        if key in schema:
            return schema[key]
        schema = _referred(schema, root)
    return None


def types_of(schema: object, root: Mapping[str, Any]) -> set[str]:
    """Types that a schema names, itself or through references and alternatives.

    Clients write these schemas, in circles too: `MAX_PARTS` of one are looked at.
    """
    found: set[str] = set()
    parts, seen = [schema], {id(schema)}
    for part in parts:  # grows meanwhile
        if isinstance(part, Mapping):
            found.update(_own_types(part))
            more = islice(_parts(part, root), MAX_PARTS - len(parts))
            new = {id(it): it for it in more if id(it) not in seen}
            parts += new.values()
            seen |= new.keys()
    return found


def definitions_of(root: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a schema that references to `root` need."""
    return {key: root[key] for key in _DEFINITIONS if key in root}


def _own_types(schema: Mapping[str, Any]) -> Iterator[str]:
    named = schema.get("type")
    if named is None:
        enum = schema.get("enum")
        values = enum if isinstance(enum, list) else []
        values = [schema["const"]] if "const" in schema else values
        yield from (_NAMES[type(it)] for it in values[:MAX_PARTS] if type(it) in _NAMES)
    names = named if isinstance(named, list) else [named]
    yield from (name for name in names[:MAX_PARTS] if isinstance(name, str))


def _parts(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Iterable[object]:
    yield _target(schema.get("$ref"), root)
    for key in ("anyOf", "oneOf", "allOf"):
        options = schema.get(key)
        yield from options if isinstance(options, list) else ()


def _referred(schema: Mapping[str, Any], root: Mapping[str, Any]) -> object:
    match schema.get("allOf"):
        case [part]:
            return part
    return _target(schema.get("$ref"), root)


def _target(reference: object, root: Mapping[str, Any]) -> object:
    """What a local reference such as `#/$defs/Address` stands for; None for any other."""
    if not isinstance(reference, str) or len(reference) > MAX_REFERENCE_CHARS:
        return None
    start, *keys = [
        unquote(key).replace("~1", "/").replace("~0", "~") for key in reference.split("/")
    ]
    if start != "#" or not keys or keys[0] not in _DEFINITIONS:
        return None
    found: object = root
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found
