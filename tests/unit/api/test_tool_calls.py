"""Calls of tools in the text of answers, family by family, in pieces of any size."""

import json
import time
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.api.tool_calls import Reading, ToolCallReader, ToolCallRules
from serving.api.tool_syntaxes import SYNTAXES, XmlCalls, choose_syntax, types_of
from serving.config import ToolCallParser

PARAMETERS: dict[str, dict[str, Any]] = {
    "tree": {
        "$ref": "#/$defs/Tree",
        "$defs": {
            "Tree": {
                "properties": {"of": {"type": "array", "items": {"$ref": "#/$defs/Tree"}}},
                "type": "object",
            }
        },
    },
    "weather": {
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "wet": {"type": ["boolean", "null"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "at": {"type": "object"},
            "place": {"$ref": "#/$defs/Place"},
            "maybe": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
            "old": {"allOf": [{"$ref": "#/definitions/a~1b%20c"}], "description": "d"},
            "level": {"$ref": "#/$defs/Level"},
            "one": {"enum": [1, 2]},
            "three": {"const": 3},
            "word": {"const": "3"},
            "loop": {"$ref": "#/$defs/Loop"},
            "lost": {"$ref": "#/$defs/Nothing"},
        },
        "$defs": {
            "Place": {"type": "object", "properties": {"city": {"type": "string"}}},
            "Level": {"enum": [1, 2], "type": "integer"},
            "Loop": {"anyOf": [{"$ref": "#/$defs/Loop"}, {"type": "array"}]},
        },
        "definitions": {"a/b c": {"type": "object"}},
    },
}
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
NEMOTRON = (
    f'<TOOLCALL>[{HERMES.split(chr(10))[1]}, {{"name": "now", "arguments": {{}}}}]</TOOLCALL>'
)
XML = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\n\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
BARE = "\n<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"
XML_SYNTAX = XmlCalls()
PIECES = (
    *("hello ", "\n", "<", "<tool", "_call>", "<tool_call>", "</tool_call>", "</tool", "é €"),
    *(HERMES, XML, NEMOTRON, "<TOOLCALL>", "</TOOLCALL>", "<function=f>", "</function>", '{"a":'),
    *(BARE, "<function=tree>", "<parameter=of>", "\n</parameter>", "\n```\n", " "),
)


def read(name: ToolCallParser, *deltas: str, max_calls: int | None = None) -> Reading:
    """All that a reader makes of some deltas."""
    syntax = SYNTAXES[name]
    assert syntax is not None
    reader = ToolCallReader(ToolCallRules(syntax, PARAMETERS, max_calls))
    found = [*(reader.feed(delta) for delta in deltas), reader.feed("", ended=True)]
    calls = tuple(call for it in found for call in it.calls)
    assert reader.num_calls == len(calls)
    return Reading("".join(it.text for it in found), calls)


def arguments_of(found: Reading) -> list[object]:
    return [json.loads(call.arguments) for call in found.calls]


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", HERMES, [("weather", {"city": "Rome"})]),
        ("granite4", f"{HERMES}\n{HERMES}", [("weather", {"city": "Rome"})] * 2),
        ("hermes", '<tool_call>{"name":"f","arguments":"{}"}</tool_call>', [("f", {})]),
        ("hermes", HERMES.removesuffix("</tool_call>"), [("weather", {"city": "Rome"})]),
        ("nemotron_json", NEMOTRON, [("weather", {"city": "Rome"}), ("now", {})]),
        ("qwen3_coder", XML, [("weather", {"city": "Rome\n", "days": 3})]),
        ("qwen3_xml", "<tool_call><function=now></function></tool_call>", [("now", {})]),
    ],
)
def test_every_family_s_calls_are_read(
    name: ToolCallParser, text: str, calls: list[tuple[str, object]]
) -> None:
    found = read(name, text)
    assert [call.name for call in found.calls] == [name for name, _ in calls]
    assert arguments_of(found) == [arguments for _, arguments in calls]
    assert found.text == ""


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", '<tool_call>{"name": "weather", "arguments": {"city": VALUE}}</tool_call>'),
        (
            "qwen3_coder",
            "<tool_call><function=weather><parameter=city>VALUE</parameter></function></tool_call>",
        ),
    ],
)
def test_an_end_marker_inside_a_value_is_part_of_it(name: ToolCallParser, text: str) -> None:
    value = 'say "</tool_call>" twice: </tool_call>'
    written = json.dumps(value) if name == "hermes" else value
    whole = text.replace("VALUE", written) + " then"
    for size in (1, 7, len(whole)):
        found = read(name, *(whole[at : at + size] for at in range(0, len(whole), size)))
        assert arguments_of(found) == [{"city": value}]
        assert found.text == " then"


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("city", "3", "3"),
        ("city", "null", "null"),
        ("days", "three", "three"),
        ("days", "None", None),
        ("wet", "True", True),
        ("wet", "null", None),
        ("note", "None", None),
        ("note", "7", "7"),
        ("at", '{"x": [1, 2]}', {"x": [1, 2]}),
        ("at", "[" * 5000, "[" * 5000),
        ("unknown", "7", "7"),
        ("place", '{"city": "Rome"}', {"city": "Rome"}),
        ("maybe", '{"city": "Rome"}', {"city": "Rome"}),
        ("maybe", "null", None),
        ("old", '{"x": 1}', {"x": 1}),
        ("level", "2", 2),
        ("one", "2", 2),
        ("three", "3", 3),
        ("word", "3", "3"),
        ("loop", "[1]", [1]),
        ("lost", "[1]", "[1]"),
    ],
)
def test_values_of_tags_have_the_types_of_the_schema(key: str, text: str, value: object) -> None:
    body = f"<function=weather><parameter={key}>{text}</parameter></function>"
    assert arguments_of(read("qwen3_coder", f"<tool_call>{body}</tool_call>")) == [{key: value}]


def test_schemas_that_refer_to_each_other_without_end_cost_little() -> None:
    """Clients write them, and every value of a call asks."""
    many = [{"$ref": f"#/$defs/d{number}"} for number in range(100)]
    root: dict[str, Any] = {"$defs": {f"d{number}": {"anyOf": many} for number in range(100)}}
    root["$defs"]["d99"] = {"$ref": "#/$defs" + "/a" * 500_000}
    began = time.process_time()
    for _ in range(100):
        assert types_of(many[0], root) == types_of(many[99], root) == set()
    assert time.process_time() - began < 1


def test_arguments_that_are_a_reference_themselves_have_its_types() -> None:
    """As Pydantic writes a model that holds itself."""
    body = "<function=tree><parameter=of>[{}]</parameter></function>"
    assert arguments_of(read("qwen3_coder", f"<tool_call>{body}</tool_call>")) == [{"of": [{}]}]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "no call, but < and <tool_cal"),
        ("hermes", "  \n"),
        ("hermes", '<tool_call>{"name": "f"}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1</tool_call> then'),
        ("hermes", "<tool_call>" + "[" * 100_000),
        ("hermes", XML),
        ("qwen3_coder", HERMES),
        ("qwen3_coder", "<tool_call><function=f>what</function></tool_call>"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\nbroken off"),
        ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n"),
        ("qwen3_coder", "it says <function=tree>\n</function> there"),
        ("qwen3_coder", "<function=tree> is\n<function=tree> what </function> I call"),
        ("qwen3_coder", "```xml\n<function=tree>\n</function>\n```"),
        ("qwen3_coder", "<function=other>\n</function>\n</tool_call>"),
        ("hermes", "<function=tree>\n</function>"),
        ("nemotron_json", HERMES),
    ],
    ids=lambda it: it[:40],
)
def test_text_that_is_no_call_stays_content(name: ToolCallParser, text: str) -> None:
    assert read(name, text) == Reading(text, ())


def test_white_space_alone_around_calls_is_dropped_and_text_is_kept() -> None:
    assert read("hermes", f"\n\n{HERMES}\n{HERMES}\n").text == ""
    assert read("hermes", f"Wait.\n{HERMES}\n Then {HERMES}").text == "Wait.\n\n Then "


@pytest.mark.parametrize("name", ["hermes", "nemotron_json"])
def test_code_in_an_argument_costs_no_more_than_its_length(name: ToolCallParser) -> None:
    """Its quotes are escaped, and its string is open where an end marker stands in it."""
    syntax = SYNTAXES[name]
    assert syntax is not None
    start, end = syntax.start, syntax.end

    def cost_of(num_quotes: int) -> float:
        reader = ToolCallReader(ToolCallRules(syntax, PARAMETERS))
        reader.feed(start + '{"name": "f", "arguments": {"code": "' + '\\"' * num_quotes)
        began = time.thread_time()
        assert reader.feed(end) == ("", ())
        cost = time.thread_time() - began
        (call,) = reader.feed('"}}' + end).calls
        assert json.loads(call.arguments) == {"code": '"' * num_quotes + end}
        return cost

    assert cost_of(6000) < 20 * max(cost_of(600), 0.002)


def test_without_parallel_calls_the_first_one_counts() -> None:
    assert len(read("hermes", HERMES * 3, max_calls=1).calls) == 1
    assert len(read("nemotron_json", NEMOTRON, max_calls=1).calls) == 1


def test_a_stream_shows_no_half_marker_and_no_half_call() -> None:
    syntax = SYNTAXES["hermes"]
    assert syntax is not None
    reader = ToolCallReader(ToolCallRules(syntax))
    shown = [reader.feed(char) for char in f"see <b> {HERMES}"]
    assert "".join(it.text for it in shown) == "see <b> "
    assert [len(it.calls) for it in shown] == [0] * (len(shown) - 1) + [1]


@given(
    name=st.sampled_from(["hermes", "qwen3_coder", "nemotron_json"]),
    pieces=st.lists(st.sampled_from(PIECES), max_size=8),
    data=st.data(),
)
def test_any_split_reads_as_the_whole(
    name: ToolCallParser, pieces: list[str], data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    ends = zip([0, *cuts], [*cuts, len(text)], strict=True)
    assert read(name, *(text[start:end] for start, end in ends)) == read(name, text)


TEXTS = st.text('ab <>/=\n{}"é', max_size=12).map(lambda it: it.strip("\n"))
NOTES = st.dictionaries(st.sampled_from(["city", "note", "word"]), TEXTS, max_size=3)
TAGS = ("</parameter>", "</function>", "</tool_call>")


@given(
    calls=st.lists(NOTES, min_size=1, max_size=3),
    line=st.sampled_from(["\n", ""]),
    data=st.data(),
)
def test_a_closing_tag_that_is_forgotten_or_misspelt_changes_no_call(
    calls: list[dict[str, str]], line: str, data: st.DataObject
) -> None:
    parts: list[str] = []
    for arguments in calls:
        parts += ["<tool_call>", line, "<function=weather>", line]
        for key, value in arguments.items():
            parts += [f"<parameter={key}>", line, value, line, TAGS[0], line]
        parts += [TAGS[1], line, TAGS[2], line]
    wrong = data.draw(st.sampled_from([None, *(n for n, it in enumerate(parts) if it in TAGS)]))
    if wrong is not None:
        tag = parts[wrong]
        parts[wrong] = data.draw(st.sampled_from(["", tag[:-2] + ">", tag[:-1] + "s>"]))
        if not parts[wrong]:
            del parts[wrong + 1]  # its line feed
    text = "".join(parts)
    cut = data.draw(st.integers(0, len(text)))
    found = read("qwen3_coder", text[:cut], text[cut:])
    assert arguments_of(found) == calls
    assert found.text.strip() == ""


GLOB = "<function=glob>\n<parameter=pattern>\n*.md\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("text", "content", "patterns"),
    [
        ("I list.\n\n" + GLOB + "\n</tool_call>", "I list.\n\n", ["*.md"]),
        (f"{GLOB}\n{GLOB}{GLOB}\n</tool_call>\n{GLOB}\nso", "\nso", ["*.md"] * 4),
        (f"<tool_call>\n{GLOB}\n{GLOB}\n</tool_call> so", " so", ["*.md"] * 2),
        (GLOB.replace("\n</function>", "\n</tool_call>"), "", ["*.md"]),
        (GLOB.replace("\n</parameter>", ""), "", ["*.md"]),
        (f"```\n{GLOB}\n```\n  {GLOB}", f"```\n{GLOB}\n```\n  ", ["*.md"]),
        (
            GLOB.replace("*.md", 'a "<parameter=x>" and "</function>"\nb'),
            "",
            ['a "<parameter=x>" and "</function>"\nb'],
        ),
        ("<tool_call>" + GLOB.replace("*.md", "a\n</tool_call>\n"), "", ["a\n</tool_call>\n"]),
        (
            f"<tool_call>\n{GLOB}\n</tool_call>\n".replace("</parameter>\n", "") * 70 + "end",
            "end",
            ["*.md"] * 70,
        ),
    ],
    ids=lambda it: str(it)[:30],
)
def test_calls_may_lack_the_tags_around_them(text: str, content: str, patterns: list[str]) -> None:
    parameters = {"glob": {"properties": {"pattern": {"type": "string"}}}}
    for size in (1, 5, len(text)):
        reader = ToolCallReader(ToolCallRules(XML_SYNTAX, parameters))
        found = [reader.feed(text[at : at + size]) for at in range(0, len(text), size)]
        found.append(reader.feed("", ended=True))
        calls = [call for it in found for call in it.calls]
        assert [json.loads(call.arguments) for call in calls] == [{"pattern": p} for p in patterns]
        assert "".join(it.text for it in found).lstrip("\n") == content.lstrip("\n")


def test_the_chat_template_tells_how_calls_are_written() -> None:
    hermes = '{"name": <function-name>, "arguments": ...} in <tool_call></tool_call>'
    written = {
        "hermes": hermes,
        "qwen3_coder": "<tool_call><function=example>",
        "nemotron_json": "<TOOLCALL>[]</TOOLCALL>",
        "none": "{{ messages }}",
    }
    for name, template in written.items():
        assert choose_syntax("auto", template) is SYNTAXES[name]  # type: ignore[index]
    assert choose_syntax("auto", None) is None
    assert choose_syntax("none", hermes) is None
    assert {"auto", *SYNTAXES} == set(get_args(ToolCallParser))
