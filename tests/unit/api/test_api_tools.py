"""Tools of a chat, from the JSON body to the prompt: what is rendered, and what is refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from engine.errors import InvalidRequestError
from serving.api.json_body import decode_body
from serving.api.plan import plan_chat
from serving.api.schema import MAX_ARGUMENT_ITEMS, ChatRequest
from serving.api.served_model import ServedModel
from serving.api.tokenizer import Tokenizer, load_tokenizer
from serving.api.tool_calls import forced_grammar
from serving.api.tool_syntaxes import SYNTAXES, JsonCalls
from serving.config import ToolCallParser
from tests.support.api.api_double import tiny_serving, write_model_folder

SEEN = "{{ messages | tojson }}|{{ tools | tojson }}"
"""A template that shows all that it is given."""
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
ASKED = {"role": "user", "content": "how is it in Rome?"}
CALLED: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome", "days": [1]}'},
        }
    ],
}
ANSWERED = {"role": "tool", "tool_call_id": "call_1", "name": "weather", "content": "sunny"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder: Path = write_model_folder(tmp_path_factory.mktemp("model"))
    (folder / "chat_template.jinja").write_text(SEEN)
    return tiny_serving(load_tokenizer(folder), max_model_len=4096)


def rendered(served: ServedModel, **body: Any) -> tuple[list[dict[str, Any]], Any]:
    """Messages and tools as the chat template got them."""
    plan = plan_chat(msgspec.json.encode({"messages": [ASKED], **body}), served)
    messages, _, tools = served.tokenizer.decode(plan.prompt_of(0)).rpartition("|")
    return json.loads(messages), json.loads(tools)


def test_calls_and_their_results_reach_the_template(served: ServedModel) -> None:
    """Arguments as an object, which the field's templates take apart; no content is no text."""
    messages, tools = rendered(served, messages=[ASKED, CALLED, ANSWERED])
    call = CALLED["tool_calls"][0]
    function = {"name": "weather", "arguments": {"city": "Rome", "days": [1]}}
    assert messages[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{**call, "function": function}],
    }
    assert messages[2] == ANSWERED
    assert tools is None


@pytest.mark.parametrize(
    "turn",
    [
        {"content": None, "refusal": "no"},
        {"content": [{"type": "refusal", "refusal": "no"}]},
        {"content": [{"text": "no"}], "refusal": None, "annotations": []},
        {"content": "no", "annotations": [{"type": "url_citation", "url_citation": {"url": "x"}}]},
        {"content": "no", "refusal": "never"},
    ],
)
def test_refusals_and_annotations_of_a_history_are_taken(
    served: ServedModel, turn: dict[str, Any]
) -> None:
    messages, _ = rendered(served, messages=[ASKED, {"role": "assistant", **turn}, ASKED])
    assert messages[1] == {"role": "assistant", "content": "no"}


@pytest.mark.parametrize(
    ("turn", "message"),
    [
        ({"role": "user", "content": None, "refusal": "x"}, "only the assistant refuses"),
        ({"role": "assistant", "content": None, "refusal": 5}, "Expected `str"),
        ({"role": "user", "content": [{"type": "text"}]}, "text: required parameter is missing"),
        ({"role": "assistant", "content": [{"type": "refusal", "text": "x"}]}, "refusal: required"),
    ],
)
def test_refusals_and_parts_without_their_text_are_named(
    served: ServedModel, turn: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        rendered(served, messages=[turn])


@pytest.mark.parametrize(
    "arguments",
    [
        "",
        "[1]",
        '{"path": "a.py',
        "{}",
        "null",
        '"text"',
        "{}{}",
        '{"a": 1e999}',
        '{"a":"\\ud800"}',
    ],
)
def test_a_chat_goes_on_after_arguments_that_are_no_object(
    served: ServedModel, arguments: str
) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    with capture_logs() as logs:
        messages, _ = rendered(served, messages=[ASKED, turn, turn])
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert [it["num_calls"] for it in logs] == ([] if arguments in ("", "{}") else [2])


@pytest.mark.parametrize("arguments", [{"a": {"b": [1, "é"]}}, {}, None])
def test_arguments_may_be_the_object_itself(served: ServedModel, arguments: object) -> None:
    call = {"id": "x", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "tool_calls": [call]}
    messages, _ = rendered(served, messages=[ASKED, turn])
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == (arguments or {})


def test_allowed_tools_are_those_of_the_tools_that_the_choice_names(served: ServedModel) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "weather"}}
    for mode, is_forced in (("auto", False), ("required", True)):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named]}}
        body = {"tools": [other, WEATHER], "tool_choice": choice}
        plan = plan_chat(msgspec.json.encode({"messages": [ASKED], **body}), served)
        assert served.tokenizer.decode(plan.prompt_of(0)).endswith(f"|[{json.dumps(WEATHER)}]")
        assert bool(plan.requests[0].sampling.grammar) is is_forced


@pytest.mark.parametrize("choice", [{}, {"tool_choice": "auto"}, {"tool_choice": None}])
def test_tools_are_rendered_unless_the_choice_is_none(
    served: ServedModel, choice: dict[str, Any]
) -> None:
    strict = {**WEATHER, "function": {"strict": True, **WEATHER["function"]}}  # type: ignore[dict-item]
    assert rendered(served, tools=[strict], **choice)[1] == [WEATHER]
    assert rendered(served, tools=[WEATHER], tool_choice="none")[1] is None


def test_parallel_tool_calls_and_no_tools_at_all_are_accepted(served: ServedModel) -> None:
    for parallel in (True, False, None):
        body = {"tools": [WEATHER], "parallel_tool_calls": parallel}
        assert rendered(served, **body)[1] == [WEATHER]
    assert rendered(served, tools=[], tool_choice="auto")[1] is None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"tool_choice": "required", "tools": []}, "tool_choice", "'required' names none of tools"),
        ({"tool_choice": "required", "detokenize": False}, "tool_choice", "leave detokenize out"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "other"}}},
            "tool_choice",
            "names none of tools",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "'image_url': this model reads text only",
        ),
        (
            {"messages": [{**CALLED, "tool_calls": [{"function": {"name": "f", "arguments": 5}}]}]},
            "messages[0].tool_calls[0].function",
            "`str | object | null`",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "web_search"),
        ({"tools": [{**WEATHER, "function": {"name": ""}}]}, "tools[0].function.name", "length"),
        ({"tools": [WEATHER] * 513}, "tools", "512"),
        ({"tools": [WEATHER] * 9000}, "tools", "tools take .* bytes"),
        ({"messages": [{**ASKED, "tool_calls": CALLED["tool_calls"]}]}, "messages[0]", "assistant"),
        ({"messages": [{**ANSWERED, "content": None}]}, "messages[0].content", "missing"),
        (
            {"messages": [{**CALLED, "tool_calls": CALLED["tool_calls"] * 257}]},
            "messages[0].tool_calls",
            "256",
        ),
    ],
)
def test_wrong_tools_and_calls_are_named(
    served: ServedModel, body: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        rendered(served, **{"tools": [WEATHER], **body})
    assert caught.value.param == param


@pytest.mark.parametrize(
    "name",
    ["hermes", "none"],
)
@pytest.mark.parametrize(
    ("body", "is_parallel"),
    [
        ({"tool_choice": "required"}, True),
        ({"tool_choice": "required", "parallel_tool_calls": False}, False),
        ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, False),
    ],
)
def test_a_required_tool_may_be_called_again_and_a_named_one_not(
    served: ServedModel, body: dict[str, Any], is_parallel: bool, name: ToolCallParser
) -> None:
    """Without a parser in JSON."""
    reader = replace(served, tool_calls=SYNTAXES[name])
    asked = {"messages": [ASKED], "tools": [WEATHER], **body}
    plan = plan_chat(msgspec.json.encode(asked), reader)
    args = (["weather"], {"weather": PARAMETERS})
    grammar = forced_grammar(
        JsonCalls("<tool_call>", "</tool_call>"),
        *args,
        is_parallel=is_parallel,
        tokenizer=Tokenizer(),
    )
    assert plan.requests[0].sampling.grammar == grammar
    assert plan.tool_calls is not None


@pytest.mark.parametrize("is_text", [True, False])
def test_arguments_of_too_many_values_are_refused_before_they_are_built(
    served: ServedModel, is_text: bool
) -> None:
    many = '{"a":[' + "1," * MAX_ARGUMENT_ITEMS + "1]}"
    call = {"function": {"name": "f", "arguments": many if is_text else msgspec.Raw(many.encode())}}
    body = msgspec.json.encode({"messages": [{**CALLED, "tool_calls": [call]}]})
    assert decode_body(body, ChatRequest, 4096).messages
    with pytest.raises(InvalidRequestError, match="hold 262146 values"):
        plan_chat(body, served)
