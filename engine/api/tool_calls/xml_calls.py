"""Tool calls written as tags: <function=NAME><parameter=KEY>VALUE</parameter></function>."""

import json
import re
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine.api.tool_calls.schema_types import definitions_of, lookup, types_of
from engine.api.tool_calls.syntax import Parameters, ToolCall, json_rule

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.S)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*", re.S)
_NULLS = ("null", "none")
NEW_LINE: Final = "\n"
PARAMETER_END: Final = json.dumps("\n</parameter>\n")


class XmlCalls:
    """Calls of Qwen3-Coder, Qwen3.5 and Nemotron 3; values have the types of the schema.

    The templates write one line feed around each value, which is not part of it.
    """

    start = "<tool_call>"
    end = "</tool_call>"

    def rules(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Required parameters, and others if the model likes, in the order of the schema."""
        parts, rules = [json.dumps(f"<function={name}>\n")], []
        properties = lookup(schema, schema, "properties") or {}
        required = lookup(schema, schema, "required") or ()
        for number, (key, one) in enumerate(properties.items()):
            value = f"{rule}_value_{number}"
            tagged = f"({json.dumps(f'<parameter={key}>' + NEW_LINE)} {value})"
            parts.append(tagged if key in required else f"{tagged}?")
            rules.append(_value_rule(value, one, schema))
        return [f'{rule}: {" ".join(parts)} "</function>"', *rules]

    def is_open(self, body: str) -> bool:
        return body.rfind("<parameter=") > body.rfind("</parameter>")

    def parse(self, body: str, parameters: Parameters) -> tuple[ToolCall, ...]:
        """One call, its arguments as a JSON object made of the tags."""
        function = _FUNCTION.fullmatch(body)
        values = None if function is None else _values(function[2])
        if function is None or values is None:
            return ()
        name = function[1].strip()
        root = parameters.get(name, {})
        properties = lookup(root, root, "properties")
        schemas = properties if isinstance(properties, dict) else {}
        typed = {key: types_of(schemas.get(key), root) for key in values}
        arguments = {key: _typed(value, typed[key]) for key, value in values.items()}
        try:
            return (ToolCall(name, msgspec.json.encode(arguments).decode()),)
        except RecursionError:
            return ()


def _value_rule(rule: str, schema: object, root: Mapping[str, Any]) -> str:
    """A text without tags, or JSON for a value that cannot be a text; and the tag that ends it."""
    types = types_of(schema, root)
    if not isinstance(schema, Mapping) or not types or "string" in types:
        if texts := _texts(schema, root):
            return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {PARAMETER_END}"
        # One expression: of two, the first would take the line feed that the second begins with.
        return f"{rule}: " + r"/([^<]|<[^\/])*\n<\/parameter>\n/"
    value = json_rule(f"{rule}_json", {**schema, **definitions_of(root)})
    return f"{rule}: {rule}_json {PARAMETER_END}\n{value}"


def _texts(schema: object, root: Mapping[str, Any]) -> list[str]:
    """The texts that a schema lists, if it lists nothing else."""
    listed = lookup(schema, root, "enum")
    values = listed if isinstance(listed, list) else [lookup(schema, root, "const")]
    return values if all(isinstance(value, str) for value in values) else []


def _values(text: str) -> dict[str, str] | None:
    """Texts of all parameters; None where there is anything beside them."""
    found, at = {}, 0
    while match := _PARAMETER.match(text, at):
        found[match[1].strip()] = match[2].removeprefix("\n").removesuffix("\n")
        at = match.end()
    return None if text[at:].strip() else found


def _typed(text: str, types: set[str]) -> Any:
    """The value that a text stands for; the text itself if it is not of the schema's types."""
    is_text = "string" in types or not types
    # Templates write null and booleans as Python does: None, True.
    if text.lower() in _NULLS and (not is_text or "null" in types):
        return None
    if is_text:
        return text
    if "boolean" in types and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
