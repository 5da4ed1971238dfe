"""Tool calls written as tags: <function=NAME><parameter=KEY>VALUE</parameter></function>."""

import json
import re
from collections.abc import Mapping, Set
from typing import Any, Final

import msgspec

from serving.api.tool_calls.schema_types import definitions_of, lookup, types_of
from serving.api.tool_calls.syntax import BareCall, Parameters, Parsed, ToolCall, json_rule

_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>")
_PARAMETER_END: Final = "</parameter>"
# Also misspelt, or missing where the text shows that the call is over.
_FUNCTION_END = re.compile(r"\s*(?:</func[^<>\n]*>?|(?=</?tool|<function=))")
_CALL_END = re.compile(r"\s*</tool[^<>\n]*>?")
# What ends a value whose own tag is missing. No two parts that repeat stand side by side, and no
# name reaches over the next `<`: searching costs as much as the text is long.
_NEXT_PARAMETER = re.compile(r"(\n[ \t]*)?<parameter=([^<>\n]+)>")
_NEXT_CALL = re.compile(
    r"(?:</function>\s*(?:</tool_call>\s*)?|\n[ \t]*</tool_call>\s*)(?:<tool_call>\s*)?<function="
)
_END = re.compile(
    r"\n[ \t]*</(?:function|tool_call)>|</function>(?=\s*(?:</?tool_call>|<function=|\Z))"
)
_MISSPELT = re.compile(r"</param[^<>\n]*>?\s*")
_NULLS = ("null", "none")
NEW_LINE: Final = "\n"
PARAMETER_END: Final = json.dumps("\n</parameter>\n")


class XmlCalls:
    """Calls of Qwen3-Coder, Qwen3.5 and Nemotron 3; values have the types of the schema.

    The templates write one line feed around each value, which is not part of it. Closing tags may
    be missing where the next tag tells as much, which `_value` explains.
    """

    start = "<tool_call>"
    end = "</tool_call>"
    bare: BareCall | None = BareCall(
        "<function=", ("<parameter=", "</function>", "</tool_call>"), "</function>"
    )

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

    def is_open(self, call: str) -> bool:
        """After the last value that has an end: one begins, and no other call does."""
        closed = call.rfind(_PARAMETER_END) + 1
        return call.find("<parameter=", closed) >= 0 and not _NEXT_CALL.search(call, closed)

    def parse(self, call: str, parameters: Parameters) -> Parsed:
        """Calls side by side, the arguments of each as a JSON object made of its tags."""
        calls: list[ToolCall] = []
        at = len(self.start) if call.startswith(self.start) else 0
        while function := _FUNCTION.match(call, at):
            name = function[1].strip()
            root = parameters.get(name, {})
            properties = lookup(root, root, "properties")
            schemas = properties if isinstance(properties, dict) else {}
            values, end = _values(call, function.end(), schemas)
            arguments = _arguments(values, schemas, root)
            ending = _FUNCTION_END.match(call, end)
            if ending is None or arguments is None:
                break
            calls.append(ToolCall(name, arguments))
            at = ending.end()
            if ending := _CALL_END.match(call, at):
                at = ending.end()
        return Parsed(tuple(calls), call[at:] if calls else call)


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


def _arguments(
    values: Mapping[str, str], schemas: Mapping[str, Any], root: Mapping[str, Any]
) -> str | None:
    """The JSON object; None for values that are nested too deeply to be written."""
    typed = {key: types_of(schemas.get(key), root) for key in values}
    try:
        return msgspec.json.encode(
            {key: _typed(value, typed[key]) for key, value in values.items()}
        ).decode()
    except RecursionError:
        return None


def _values(text: str, at: int, schemas: Mapping[str, Any]) -> tuple[dict[str, str], int]:
    """Texts of the parameters from `at` on, and where they end."""
    found: dict[str, str] = {}
    others = set(schemas)
    close = -1  # where the tag is that ends the present value, or a later one
    while start := _PARAMETER.match(text, at):
        key = start[1].strip()
        if close < start.end():
            close = text.find(_PARAMETER_END, start.end())
            close = len(text) if close < 0 else close
        others.discard(key)
        value = _value(text, start.end(), close, others=others)
        if value is None:
            break
        found[key], at = value
    return found, at


def _value(text: str, begin: int, close: int, *, others: Set[str]) -> tuple[str, int] | None:
    """The value from `begin` on and where it ends; None if it breaks off.

    It ends at `close`, its own tag, whatever else it holds, unless another parameter or call begins
    before. Then the tag was forgotten, and it ends there, or at the end of its own call. Parameters
    begin on a line of their own, or anywhere if they are in `others`: of the schema, not given yet.
    """
    parameters = _NEXT_PARAMETER.finditer(text, begin, close)
    parameter = next((it for it in parameters if it[1] is not None or it[2] in others), None)
    limit = close if parameter is None else parameter.start()
    call = _NEXT_CALL.search(text, begin, limit)
    if parameter is None and call is None and close < len(text):
        value = text[begin:close].removeprefix(NEW_LINE).removesuffix(NEW_LINE)
        return value, close + len(_PARAMETER_END)
    end = _END.search(text, begin, limit if call is None else call.end()) or parameter
    if end is None:
        return None
    value = text[begin : end.start()]
    misspelt = value.rfind("</param")
    if misspelt >= 0 and _MISSPELT.fullmatch(value, misspelt):
        value = value[:misspelt]
        if (line := value.rstrip(" \t")).endswith(NEW_LINE):
            value = line.removesuffix(NEW_LINE)
    # The line feed before a tag on its own line is the tag's already.
    return value.removeprefix(NEW_LINE), end.start()


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
