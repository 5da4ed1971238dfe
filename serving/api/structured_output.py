"""The grammar that a request asks for, in OpenAI's and in vLLM's words. Pure."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

import llguidance
import msgspec
from msgspec import Meta

from engine.errors import InvalidRequestError
from engine.types import MAX_GRAMMAR_CHARS

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
    made: dict[Any, Any] = {}
    for key, value in schema.items():
        is_text = isinstance(value, str)
        if key == "uniqueItems" and isinstance(value, bool):
            continue
        if key == "format" and is_text and value not in KNOWN_FORMATS:
            continue
        # Names of properties are no keys of a schema, and values of an enum are no schemas.
        if key in _MAPS and isinstance(value, Mapping):
            made[key] = {name: loosened(it) for name, it in value.items()}
        elif key == "pattern" and is_text:
            made[key] = ascii_classes(_LOOK_AROUND.sub("", value))
        else:
            made[key] = value if key in _DATA else loosened(value)
    return made


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
    named, required = schema.get("properties"), schema.get("required") or ()
    # Where properties are named, and all that must be there are among them.
    if isinstance(named, Mapping) and isinstance(required, Sequence):
        names_all = all(isinstance(it, str) and it in named for it in required)
        if names_all and schema.keys().isdisjoint(_OTHERS):
            made["additionalProperties"] = False
    return made


Text = Annotated[str, Meta(max_length=MAX_GRAMMAR_CHARS)]
Choices = Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1, max_length=1024)]
ANY_OBJECT = {"type": "object"}


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's wrapping of a schema; `strict` changes nothing, since every schema is enforced."""

    schema_: Any = msgspec.field(name="schema", default=None)
    name: Annotated[str, Meta(max_length=256)] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Any = msgspec.field(name="schema", default=None)  # llama.cpp's


class StructuredOutputs(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """vLLM's `structured_outputs`; exactly one of them is given."""

    json: Any = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class GrammarFields(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The keys of a request that may ask for a grammar; `guided_*` are vLLM's former ones.

    `regex` and `ebnf` are SGLang's, `grammar` is llama.cpp's, `json_schema` that of both.
    """

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: Text | None = None
    guided_choice: list[str] | None = None
    guided_grammar: Text | None = None
    regex: Text | None = None
    json_schema: Any = None
    grammar: Text | None = None
    ebnf: Text | None = None


def grammar_of(fields: GrammarFields) -> str:
    """The grammar for `SamplingParams`, empty for none; written here, and compiled by nodes alone.

    Raises InvalidRequestError for what no grammar can be written of, and for two at once.
    """
    asked = [(param, make, value) for param, make, value in _asked(fields) if value is not None]
    if not asked:
        return ""
    if len(asked) > 1:
        names = " and ".join(param for param, _, _ in asked)
        raise InvalidRequestError(f"{names} both bind the output: give one", param=asked[1][0])
    ((param, make, value),) = asked
    try:
        grammar = make(value)
    except RecursionError as error:
        raise InvalidRequestError(
            f"{param} is nested too deeply: flatten it", param=param
        ) from error
    except ValueError as error:
        raise InvalidRequestError(f"{param} is no grammar: {error}", param=param) from error
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"{param} has {len(grammar)} characters, {MAX_GRAMMAR_CHARS} are allowed", param=param
        )
    return grammar


def grammar_param(fields: GrammarFields) -> str | None:
    """The name of the field that `grammar_of` reads."""
    return next((param for param, _, value in _asked(fields) if value is not None), None)


Asked = tuple[str, Callable[[Any], str], Any]


def _asked(fields: GrammarFields) -> list[Asked]:
    outputs = fields.structured_outputs
    if outputs is not None:
        _check_outputs(outputs)
    outputs = outputs or StructuredOutputs()
    return [
        ("response_format", _json, _schema_of(fields.response_format)),
        ("structured_outputs.json", _json, outputs.json),
        ("structured_outputs.json_object", _json, ANY_OBJECT if outputs.json_object else None),
        ("structured_outputs.regex", _regex, outputs.regex),
        ("structured_outputs.choice", _choice, outputs.choice),
        ("structured_outputs.grammar", _lark, outputs.grammar),
        ("guided_json", _json, fields.guided_json),
        ("guided_regex", _regex, fields.guided_regex or None),
        ("guided_choice", _choice, fields.guided_choice or None),
        ("guided_grammar", _lark, fields.guided_grammar or None),
        ("regex", _regex, fields.regex or None),
        ("json_schema", _json, None if fields.json_schema == "" else fields.json_schema),
        ("grammar", _lark, fields.grammar or None),
        ("ebnf", _lark, fields.ebnf or None),
    ]


def _check_outputs(outputs: StructuredOutputs) -> None:
    """Raise InvalidRequestError for a wish that would be ignored, such as a misspelt key."""
    if outputs.structural_tag is not None:
        raise InvalidRequestError(
            "structured_outputs.structural_tag is not supported: use tools, or give json, regex, "
            "choice or grammar",
            param="structured_outputs.structural_tag",
        )
    # By its fields: bodies with unknown keys are decoded as a subclass, which equals no other.
    if all(value is None for value in msgspec.structs.asdict(outputs).values()):
        raise InvalidRequestError(
            "structured_outputs asks for nothing that is known: give json, regex, choice, grammar "
            "or json_object",
            param="structured_outputs",
        )


def _schema_of(form: ResponseFormat | None) -> Any:
    """The schema that a `response_format` means; None for plain text."""
    if form is None or form.type == "text":
        return None
    # In either place, as clients of other servers put it: a schema is never ignored.
    wrapped = None if form.json_schema is None else form.json_schema.schema_
    schema = form.schema_ if wrapped is None else wrapped
    if schema is not None:
        return schema
    if form.type == "json_schema":
        raise InvalidRequestError(
            "response_format of type json_schema needs json_schema.schema", param="response_format"
        )
    return ANY_OBJECT


def _json(schema: Any) -> str:
    if isinstance(schema, str):
        schema = json.loads(schema)
    if schema is True:  # JSON Schema's short form of "anything"
        schema = {}
    if isinstance(schema, dict):
        # A caller's own options win; ones that are no object are for llguidance to name.
        given = schema.get("x-guidance", {})
        options = {**COERCE_ONE_OF, **given} if isinstance(given, dict) else given
        schema = {**loosened(schema), "x-guidance": options}
    return llguidance.LLMatcher.grammar_from_json_schema(
        json.dumps(schema),
        defaults={"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE},
    )


def _regex(pattern: str) -> str:
    return str(llguidance.LLMatcher.grammar_from_regex(ascii_classes(pattern)))


def _choice(choices: list[str]) -> str:
    return _lark("start: " + " | ".join(map(json.dumps, choices)))


def _lark(text: str) -> str:
    return str(llguidance.grammar_from("grammar", text))
