"""JSON schemas as llguidance takes them: without the few usual keys that it does not know."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

COERCE_ONE_OF: Final = {"coerce_one_of": True}
"""llguidance's option that reads `oneOf` as `anyOf` where alternatives overlap."""

WHITE_SPACE: Final = r"\n?[ \t]{0,16}"
"""Between two parts of a JSON text: a small model may like white space too much to ever end."""

KNOWN_FORMATS: Final = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)

_OTHERS: Final = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
_JOINING: Final = frozenset({"allOf", "anyOf", "oneOf", "$ref", "if"})
_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA: Final = frozenset({"const", "enum", "default", "example", "examples", "x-guidance"})
# Not after a backslash or a class's bracket; one that holds groups stays, and is refused.
_LOOK_AROUND: Final = re.compile(r"(?<![\\\[])\(\?<?[=!](?:[^()\\]|\\.)*\)")
# Of Rust's expressions, which know all scripts; callers mean ASCII. Classes may be nested.
_ASCII: Final = {"d": "[0-9]", "D": "[^0-9]", "w": "[0-9A-Za-z_]", "W": "[^0-9A-Za-z_]"}
_ESCAPE: Final = re.compile(r"\\(.)", re.S)


def ascii_classes(pattern: str) -> str:
    """A regular expression whose digits and word characters are ASCII, as JSON Schema's are."""
    return _ESCAPE.sub(lambda it: _ASCII.get(it[1], it[0]), pattern)


def loosened(schema: Any) -> Any:
    """A schema that allows all that `schema` does, and more: what its reader checks itself.

    Left out are `uniqueItems` (Pydantic's sets), formats that say nothing of the text (its paths
    and bytes) and look-around in patterns (its decimals). All other keys bind as before, and those
    that llguidance does not know are refused with their names.
    """
    if isinstance(schema, list):
        return [loosened(it) for it in schema]
    if not isinstance(schema, Mapping):
        return schema
    kept = {key: it for key, it in schema.items() if not _is_left_out(key, it)}
    return {key: _loosened_value(key, it) for key, it in kept.items()}


def closed(schema: Any) -> Any:
    """A schema whose objects have named properties alone, unless it says more of the others.

    One that joins the properties of several parts stays: each part would refuse those of the rest.
    """
    return schema if _joins(schema) else _closed(schema)


def _joins(schema: Any) -> bool:
    if isinstance(schema, list):
        return any(map(_joins, schema))
    if not isinstance(schema, Mapping):
        return False
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return True
    if "properties" in schema and not schema.keys().isdisjoint(_JOINING):
        return True
    return any(_joins(it) for key, it in schema.items() if key not in _DATA)


def _closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_closed(it) for it in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {
        key: {name: _closed(one) for name, one in it.items()}
        if key in _MAPS and isinstance(it, Mapping)
        else it
        if key in _DATA
        else _closed(it)
        for key, it in schema.items()
    }
    if _names_all(schema) and schema.keys().isdisjoint(_OTHERS):
        made["additionalProperties"] = False
    return made


def _names_all(schema: Mapping[str, Any]) -> bool:
    """Whether properties are named, and all that must be there are among them."""
    named, required = schema.get("properties"), schema.get("required") or ()
    return (
        isinstance(named, Mapping)
        and isinstance(required, Sequence)
        and all(isinstance(it, str) and it in named for it in required)
    )


def _is_left_out(key: str, value: object) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in KNOWN_FORMATS
    return key == "uniqueItems" and isinstance(value, bool)


def _loosened_value(key: str, value: Any) -> Any:
    # Names of properties are no keys of a schema, and values of an enum are no schemas.
    if key in _MAPS and isinstance(value, Mapping):
        return {name: loosened(it) for name, it in value.items()}
    if key == "pattern" and isinstance(value, str):
        return ascii_classes(_LOOK_AROUND.sub("", value))
    return value if key in _DATA else loosened(value)
