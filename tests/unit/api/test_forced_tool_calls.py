"""A forced call: whatever the grammar lets a model write is read as calls that fit their schema."""

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from engine.errors import InvalidRequestError
from serving.api.tokenizer import Tokenizer, load_tokenizer
from serving.api.tool_calls import ToolCallReader, ToolCallRules, forced_grammar
from serving.api.tool_syntaxes import SYNTAXES, ToolCall
from serving.config import ToolCallParser
from tests.support.api.grammars import refusal_of, tokens_in

MODEL = Path(__file__).parents[3] / "deploy" / "demo" / "model"
END = 2
VOCABULARY = 840
MOST_TOKENS = 2000
CLOSING = "\n</parameter>\n"
PARAMETERS: dict[str, dict[str, Any]] = {
    "weather": {
        "properties": {
            "city": {"enum": ["Rome", "Oslo"]},
            "note": {"type": "string", "maxLength": 9},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
        },
        "required": ["city", "days"],
        "additionalProperties": False,
    },
    "stop": {"properties": {}, "additionalProperties": False},
}
SPELLED = load_tokenizer(MODEL)  # it has no tokens for the markers
WRITERS: tuple[ToolCallParser, ...] = ("hermes", "qwen3_coder", "nemotron_json")


def written(grammar: str, draw: random.Random, tokenizer: Tokenizer = SPELLED) -> str:
    """A walk through the grammar by random tokens, which often goes on with `CLOSING`."""
    judge = LLTokenizer(tokenizer.to_json() or "", VOCABULARY, [END])
    matcher = LLMatcher(judge, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens, text = list[int](), ""
    for _ in range(MOST_TOKENS):
        allowed = tokens_in(matcher.compute_bitmask())
        begun = next(n for n in range(len(CLOSING) - 1, -1, -1) if text.endswith(CLOSING[:n]))
        closing = [it for it in allowed if it == END or tokenizer.token_text(it) == CLOSING[begun]]
        token = draw.choice(closing if closing and draw.random() < 0.9 else allowed)
        if token == END:
            return tokenizer.decode(tokens, skip_special_tokens=False)
        matcher.consume_token(token)
        tokens.append(token)
        text += tokenizer.token_text(token)
    raise AssertionError("the walk does not end")


def read(name: ToolCallParser, text: str) -> tuple[str, tuple[ToolCall, ...]]:
    syntax = SYNTAXES[name]
    assert syntax is not None
    reader = ToolCallReader(ToolCallRules(syntax, PARAMETERS))
    first, last = reader.feed(text), reader.feed("", ended=True)
    return first.text + last.text, (*first.calls, *last.calls)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("names", [("weather",), ("weather", "stop")])
def test_what_the_grammar_allows_is_read_as_calls(
    name: ToolCallParser, names: tuple[str, ...]
) -> None:
    syntax = SYNTAXES[name]
    assert syntax is not None
    grammar = forced_grammar(
        syntax, names, PARAMETERS, is_parallel=len(names) > 1, tokenizer=SPELLED
    )
    for seed in range(5):
        text, calls = read(name, written(grammar, random.Random(seed)))
        assert (text.strip(), bool(calls)) == ("", True)
        for call in calls:
            assert call.name in names
            arguments = msgspec.json.decode(call.arguments)
            if call.name == "weather":
                assert arguments["city"] in ("Rome", "Oslo")
                assert arguments["days"] in range(1, 10)
                assert arguments.keys() <= {"city", "note", "days"}
            else:
                assert arguments == {}
        assert len(calls) == 1 or len(names) > 1


@pytest.mark.parametrize("is_special", [True, False])
@pytest.mark.parametrize("name", WRITERS)
def test_markers_that_are_tokens_are_written_as_these(
    tmp_path: Path, name: ToolCallParser, is_special: bool
) -> None:
    syntax = SYNTAXES[name]
    assert syntax is not None
    core = tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    markers = [tokenizers.AddedToken(it, special=is_special) for it in (syntax.start, syntax.end)]
    (core.add_special_tokens if is_special else core.add_tokens)(markers)
    core.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path)
    grammar = forced_grammar(syntax, ["weather"], PARAMETERS, is_parallel=True, tokenizer=tokenizer)
    for seed in range(3):
        text, calls = read(name, written(grammar, random.Random(seed), tokenizer))
        assert text.strip() == "" and {call.name for call in calls} == {"weather"}


REFERRED: dict[str, Any] = {
    "$ref": "#/$defs/Trip",
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
        "Colour": {"enum": ["red", "blue"], "type": "string"},
        "Trip": {
            "type": "object",
            "properties": {
                "place": {"$ref": "#/$defs/Place"},
                "level": {"allOf": [{"$ref": "#/definitions/Level"}], "description": "d"},
                "colour": {"$ref": "#/$defs/Colour"},
                "three": {"const": 3},
                "word": {"const": "so"},
            },
            "required": ["place", "level", "colour", "three", "word"],
        },
    },
    "definitions": {"Level": {"enum": [1, 2]}},
}


def test_values_of_references_are_bound_too() -> None:
    syntax = SYNTAXES["qwen3_coder"]
    assert syntax is not None
    grammar = forced_grammar(
        syntax, ["trip"], {"trip": REFERRED}, is_parallel=False, tokenizer=SPELLED
    )
    for seed in range(5):
        text = written(grammar, random.Random(seed))
        (call,) = ToolCallReader(ToolCallRules(syntax, {"trip": REFERRED})).feed(text).calls
        found = msgspec.json.decode(call.arguments)
        assert found.pop("place") in ({"city": "Rome"}, {"city": "Oslo"})
        assert found.pop("level") in (1, 2)
        assert found.pop("colour") in ("red", "blue")
        assert found == {"three": 3, "word": "so"}


async def test_a_schema_that_is_none_is_refused_by_the_node() -> None:
    syntax = SYNTAXES["hermes"]
    assert syntax is not None
    grammar = forced_grammar(
        syntax, ["f"], {"f": {"type": "nothing"}}, is_parallel=False, tokenizer=SPELLED
    )
    assert "nothing" in await refusal_of(grammar)


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ({"properties": ["a"]}, r"tool 'f' .*properties=\['a'\].* object"),
        ({"properties": {"a": {}}, "required": 5}, "tool 'f' .*required=5.* array of names"),
        ({"required": [5]}, r"tool 'f' .*required=\[5\].* array of names"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"properties": 5}}}, "tool 'f' .*properties=5"),
    ],
)
def test_malformed_schemas_are_the_caller_s_fault(
    name: ToolCallParser, schema: dict[str, Any], told: str
) -> None:
    syntax = SYNTAXES[name]
    assert syntax is not None
    with pytest.raises(InvalidRequestError, match=told) as caught:
        forced_grammar(syntax, ["f"], {"f": schema}, is_parallel=False, tokenizer=SPELLED)
    assert caught.value.param == "tools"


@pytest.mark.parametrize("name", WRITERS)
def test_schemas_that_make_too_large_a_grammar_are_refused(name: ToolCallParser) -> None:
    syntax = SYNTAXES[name]
    assert syntax is not None
    schema = {"properties": {"a": {"enum": list(range(60_000))}}}
    with pytest.raises(InvalidRequestError, match="262144 are allowed") as caught:
        forced_grammar(syntax, ["f"], {"f": schema}, is_parallel=False, tokenizer=SPELLED)
    assert caught.value.param == "tools"
