"""Schemas of ordinary Pydantic models become grammars, and still bind all that can be bound."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequestError
from serving.api.json_body import lenient
from serving.api.structured_output import KNOWN_FORMATS, GrammarFields, grammar_of, loosened
from serving.api.tokenizer import Tokenizer
from serving.api.tool_calls import forced_grammar
from serving.api.tool_syntaxes import SYNTAXES
from tests.support.api.grammars import refusal_of

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
ORDINARY: list[tuple[dict[str, Any], list[Any], list[Any]]] = [
    ({"type": "array", "items": {"type": "string"}, "uniqueItems": True}, [["a"]], [[1], "a"]),
    ({"anyOf": [{"type": "number"}, {"type": "string", "pattern": DECIMAL}]}, ["1.5", 2], ["a"]),
    ({"type": "string", "format": "path", "maxLength": 3}, ["/a"], ["/long", 1]),
    ({"type": "string", "format": "binary"}, ["x"], [1]),
    ({"type": "string", "format": "date"}, ["2024-01-01"], ["x"]),
    (
        {
            "oneOf": [
                {"type": "object", "properties": {"a": {"type": "string"}}},
                {"type": "object", "properties": {"b": {"type": "integer"}}},
            ]
        },
        [{"a": "x"}, {"b": 1}],
        [1, "a"],
    ),
    ({"enum": [{"format": "x", "uniqueItems": True}]}, [{"format": "x", "uniqueItems": True}], [1]),
    (
        {
            "type": "object",
            "properties": {"uniqueItems": {"type": "boolean"}, "format": {"const": "path"}},
            "additionalProperties": False,
        },
        [{"uniqueItems": True, "format": "path"}],
        [{"uniqueItems": 1}, {"format": "b"}],
    ),
]


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return LLTokenizer((MODEL / "tokenizer.json").read_text(encoding="utf-8"), 832, [2])


def allows(tokenizer: LLTokenizer, grammar: str, text: str) -> bool:
    """True if the grammar takes all of the text and may end there."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0)
    tokens = tokenizer.tokenize_str(text)
    return matcher.validate_tokens(tokens) == len(tokens) and (
        matcher.consume_tokens(tokens) and matcher.is_accepting()
    )


def answer_grammar(schema: object) -> str:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return grammar_of(msgspec.convert({"response_format": form}, GrammarFields))


@pytest.mark.parametrize(("schema", "fitting", "others"), ORDINARY, ids=lambda it: str(it)[:40])
def test_ordinary_schemas_bind_answers_and_calls(
    tokenizer: LLTokenizer, schema: dict[str, Any], fitting: list[Any], others: list[Any]
) -> None:
    hermes = SYNTAXES["hermes"]
    assert hermes is not None
    parameters = {"f": {"properties": {"v": schema}, "required": ["v"]}}
    forced = forced_grammar(hermes, ["f"], parameters, is_parallel=False, tokenizer=Tokenizer())
    grammars = [
        (answer_grammar(schema), "{}"),
        (grammar_of(GrammarFields(guided_json=json.dumps(schema))), "{}"),
        (forced, '<tool_call>\n{{"name": "f", "arguments": {{"v": {}}}}}\n</tool_call>'),
    ]
    for grammar, written in grammars:
        for value in fitting:
            assert allows(tokenizer, grammar, written.format(json.dumps(value))), value
        for value in others:
            assert not allows(tokenizer, grammar, written.format(json.dumps(value))), value


def test_calls_have_named_arguments_alone_unless_the_schema_says_otherwise(
    tokenizer: LLTokenizer,
) -> None:
    hermes = SYNTAXES["hermes"]
    assert hermes is not None
    one: dict[str, Any] = {
        "properties": {"a": {"$ref": "#/$defs/b"}},
        "$defs": {"b": {"properties": {"c": {}}}},
    }
    written = '<tool_call>\n{{"name": "f", "arguments": {}}}\n</tool_call>'
    cases: list[tuple[dict[str, Any], str, bool]] = [
        (one, '{"a": {"c": 1}}', True),
        (one, '{"x": 1}', False),
        (one, '{"a": {"x": 1}}', False),
        ({**one, "additionalProperties": True}, '{"x": 1}', True),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, '{"a":1,"b":1}', True),
        ({}, '{"x": 1}', True),
        ({"properties": {"a": {}}, "required": ["b"]}, '{"b": 1}', True),
    ]
    for schema, text, is_allowed in cases:
        grammar = forced_grammar(
            hermes, ["f"], {"f": schema}, is_parallel=False, tokenizer=Tokenizer()
        )
        assert allows(tokenizer, grammar, written.format(text)) is is_allowed, (schema, text)


COLOUR = {"enum": ["red", "blue"]}


@pytest.mark.parametrize(
    ("fields", "fitting", "others"),
    [
        ({"regex": r"\d[\d.]\w\\d"}, [r"31a\d"], [r"٣1a\d", r"3.é\d"]),
        ({"guided_regex": r"\D"}, ["٣"], ["3"]),
        ({"json_schema": {"pattern": r"^\d\w$", "type": "string"}}, ['"1a"'], ['"٣a"', '"1é"']),
        ({"json_schema": COLOUR}, ['"red"'], ['"pink"']),
        ({"json_schema": json.dumps(COLOUR)}, ['"red"'], ['"pink"']),
        ({"grammar": 'root ::= "a" | "b"'}, ["a"], ["c"]),
        ({"ebnf": 'root ::= "a" | "b"'}, ["b"], ["c"]),
        ({"response_format": {"type": "json_object", "schema": COLOUR}}, ['"red"'], ["{}"]),
        ({"response_format": {"type": "json_schema", "schema": COLOUR}}, ['"red"'], ["{}"]),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": COLOUR}}},
            ['"red"'],
            ["{}"],
        ),
    ],
)
def test_the_words_of_other_servers_bind_too(
    tokenizer: LLTokenizer, fields: dict[str, Any], fitting: list[str], others: list[str]
) -> None:
    grammar = grammar_of(msgspec.convert(fields, GrammarFields))
    assert [allows(tokenizer, grammar, it) for it in fitting] == [True] * len(fitting)
    assert [allows(tokenizer, grammar, it) for it in others] == [False] * len(others)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({}, "asks for nothing"),
        ({"jsno": {}}, "asks for nothing"),
        ({"structural_tag": {}}, "structural_tag is not"),
    ],
)
def test_a_wish_for_structure_is_never_ignored(asked: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        grammar_of(msgspec.convert({"structured_outputs": asked}, lenient(GrammarFields)))


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"not": {"type": "string"}}, '"not"'),
        ({"type": "array", "contains": {"type": "string"}}, '"contains"'),
        ({"type": "string", "pattern": "(?=a(b))c"}, "look-around"),
        ({"type": "nothing"}, "nothing"),
    ],
)
async def test_what_cannot_be_bound_is_still_refused(schema: dict[str, Any], told: str) -> None:
    assert told in await refusal_of(answer_grammar(schema))


@pytest.mark.parametrize("name", sorted(KNOWN_FORMATS))
def test_known_formats_are_kept_and_are_known(name: str) -> None:
    schema = {"type": "string", "format": name}
    assert loosened(schema) == schema
    assert answer_grammar(schema)


@pytest.mark.parametrize("pattern", [r"a\(?=b", r"[(?=x)]", "(a|b)c", r"(?:a)(?P<n>b)"])
def test_only_look_around_is_taken_out_of_patterns(pattern: str) -> None:
    assert loosened({"pattern": pattern}) == {"pattern": pattern}


def test_schemas_nested_too_deeply_are_the_caller_s_fault() -> None:
    schema: dict[str, Any] = {}
    for _ in range(20_000):
        schema = {"items": schema}
    with pytest.raises(InvalidRequestError):
        answer_grammar(schema)
    hermes = SYNTAXES["hermes"]
    assert hermes is not None
    with pytest.raises(InvalidRequestError) as caught:
        forced_grammar(
            hermes,
            ["f"],
            {"f": {"properties": {"v": schema}}},
            is_parallel=False,
            tokenizer=Tokenizer(),
        )
    assert caught.value.param == "tools"
