"""How models write tool calls: as JSON between marks, or as XML. Each is one row of `SYNTAXES`."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from itertools import islice
from types import NoneType
from typing import Annotated, Any, Final, NamedTuple, Protocol
from urllib.parse import unquote

import msgspec
from msgspec import Meta, Raw

from serving.api.structured_output import COERCE_ONE_OF, WHITE_SPACE, loosened
from serving.config import ToolCallParser

Parameters = Mapping[str, Mapping[str, Any]]
"""JSON schema of the arguments by name of the function."""


def json_rule(rule: str, schema: Mapping[str, Any]) -> str:
    """The Lark rule for a JSON text of a schema."""
    options = {"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE, **COERCE_ONE_OF}
    return f"{rule}: %json {json.dumps({**loosened(schema), 'x-guidance': options})}"


class ToolCall(NamedTuple):
    """A function to call; `arguments` is the text of a JSON object."""

    name: str
    arguments: str


class Parsed(NamedTuple):
    """Calls that a text begins with, and the rest of it: all of it where it begins with none."""

    calls: tuple[ToolCall, ...]
    rest: str


class BareCall(NamedTuple):
    """How a call without `start` looks: `start`, a name and `>`, one of `follows`, then `end`."""

    start: str
    follows: tuple[str, ...]
    end: str


class ToolCallSyntax(Protocol):
    """How a family writes calls: text between `start` and the next `end` outside a value.

    `bare` is how models write one that forget `start`; None where that says too little.
    """

    start: str
    end: str
    bare: BareCall | None

    def rules(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """Lark rules: `rule` is a call of `name`, without the markers and their line feeds."""
        ...

    def is_open(self, call: str) -> bool:
        """True if the text from `start` on breaks off inside a value."""
        ...

    def parse(self, call: str, parameters: Parameters) -> Parsed:
        """The calls of a text with its markers, of which `end` may be missing."""
        ...


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
        match schema.get("allOf"):
            case [part]:
                schema = part
            case _:
                schema = _target(schema.get("$ref"), root)
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


def _target(reference: object, root: Mapping[str, Any]) -> object:
    """The target of a local reference such as `#/$defs/Address`; None for any other."""
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


# Possessive throughout: of a string without an end no quote is taken for the start of another.
_UP_TO_OPEN_STRING: Final = re.compile(r'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+', re.S)


class _Call(msgspec.Struct, frozen=True):
    name: Annotated[str, Meta(min_length=1)]
    arguments: Raw


class JsonCalls:
    """Calls between two markers, such as Hermes' `<tool_call>` and `</tool_call>`."""

    bare: BareCall | None = None

    def __init__(self, start: str, end: str) -> None:
        self.start = start
        self.end = end

    def rules(self, rule: str, name: str, schema: Mapping[str, Any]) -> list[str]:
        """The object, its arguments as the schema says."""
        opening = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
        return [
            f'{rule}: {opening} {rule}_args "}}"',
            json_rule(f"{rule}_args", {"type": "object", **schema}),
        ]

    def is_open(self, call: str) -> bool:
        return _UP_TO_OPEN_STRING.fullmatch(call) is None

    def parse(self, call: str, parameters: Parameters) -> Parsed:
        """The calls, their arguments as the model wrote them; `parameters` are not needed."""
        try:
            body = call.removeprefix(self.start).removesuffix(self.end)
            found = msgspec.json.decode(body, type=_Call | list[_Call])
            calls = found if isinstance(found, list) else [found]
            made = tuple(ToolCall(it.name, _object(it.arguments)) for it in calls)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            made = ()
        return Parsed(made, "" if made else call)


def _object(arguments: Raw) -> str:
    """Text of a JSON object; some models write it as a JSON string. Raises DecodeError."""
    text = bytes(memoryview(arguments)).decode()
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    msgspec.json.decode(text, type=dict[str, Any])
    return text


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
        # The texts that the schema lists, if it lists nothing else.
        listed = lookup(schema, root, "enum")
        texts = listed if isinstance(listed, list) else [lookup(schema, root, "const")]
        if texts and all(isinstance(text, str) for text in texts):
            return f"{rule}: ({' | '.join(map(json.dumps, texts))}) {PARAMETER_END}"
        # One expression: of two, the first would take the line feed that the second begins with.
        return f"{rule}: " + r"/([^<]|<[^\/])*\n<\/parameter>\n/"
    definitions = {key: root[key] for key in _DEFINITIONS if key in root}
    value = json_rule(f"{rule}_json", {**schema, **definitions})
    return f"{rule}: {rule}_json {PARAMETER_END}\n{value}"


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


_HERMES = JsonCalls("<tool_call>", "</tool_call>")
_XML = XmlCalls()

SYNTAXES: Final[Mapping[ToolCallParser, ToolCallSyntax | None]] = {
    "none": None,
    "hermes": _HERMES,
    "granite4": _HERMES,
    "qwen3_coder": _XML,
    "qwen3_xml": _XML,
    "nemotron_json": JsonCalls("<TOOLCALL>", "</TOOLCALL>"),
}


def choose_syntax(name: ToolCallParser, template: str | None) -> ToolCallSyntax | None:
    """The syntax of that name; with `auto` the one that the model's chat template writes.

    The template tells more than the model's type: Qwen3 and Qwen3-Coder share one type and write
    calls differently. None reads no calls.
    """
    if name != "auto":
        return SYNTAXES[name]
    text = template or ""
    if "<TOOLCALL>" in text:
        return SYNTAXES["nemotron_json"]
    if "<tool_call>" not in text:
        return None
    return SYNTAXES["qwen3_coder" if "<function=" in text else "hermes"]
