"""JSON schemas without the few keys that ordinary models write and llguidance does not know."""

import re
from collections.abc import Mapping
from typing import Any, Final

COERCE_ONE_OF: Final = {"coerce_one_of": True}
"""llguidance's option that reads `oneOf` as `anyOf` where alternatives overlap."""

KNOWN_FORMATS: Final = frozenset(
    {
        *("date-time", "time", "date", "duration", "email", "hostname"),
        *("ipv4", "ipv6", "uuid", "uri"),
    }
)

_MAPS: Final = frozenset({"properties", "patternProperties", "$defs", "definitions"})
_DATA: Final = frozenset({"const", "enum", "default", "example", "examples", "x-guidance"})
# Not after a backslash or a class's bracket; one that holds groups stays, and is refused.
_LOOK_AROUND: Final = re.compile(r"(?<![\\\[])\(\?<?[=!](?:[^()\\]|\\.)*\)")


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


def _is_left_out(key: str, value: object) -> bool:
    if key == "format":
        return isinstance(value, str) and value not in KNOWN_FORMATS
    return key == "uniqueItems" and isinstance(value, bool)


def _loosened_value(key: str, value: Any) -> Any:
    # Names of properties are no keys of a schema, and values of an enum are no schemas.
    if key in _MAPS and isinstance(value, Mapping):
        return {name: loosened(it) for name, it in value.items()}
    if key == "pattern" and isinstance(value, str):
        return _LOOK_AROUND.sub("", value)
    return value if key in _DATA else loosened(value)
