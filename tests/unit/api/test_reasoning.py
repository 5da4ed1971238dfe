"""Thoughts told from answers: in texts at any cut, in replies, grammars and templates."""

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import llguidance
import msgspec
import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import InvalidRequestError
from engine.types import MAX_GRAMMAR_CHARS, FinishReason
from serving.api.plan import plan_chat
from serving.api.reasoning import (
    SYNTAXES,
    Phase,
    ThoughtReader,
    Thoughts,
    ThoughtSyntax,
    after_thoughts,
    choose_thoughts,
)
from serving.api.served_model import ServedModel
from serving.api.tokenizer import Tokenizer, load_tokenizer
from serving.api.tool_syntaxes import SYNTAXES as TOOL_SYNTAXES
from serving.config import ReasoningParser
from tests.support.api.api_double import (
    CHATML,
    ScriptedGenerator,
    outputs_of,
    running,
    tiny_serving,
    write_model_folder,
)
from tests.support.api.node_double import client_of

THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
SWITCH = (
    "{{ messages | tojson }}<|im_start|>assistant\n<think>\n"
    "{% if enable_thinking is defined and not enable_thinking %}\n</think>\n\n{% endif %}"
)
CONSIDERED = """I could call
<tool_call>
<function=get_weather>
<parameter=city>
Rome
</parameter>
</function>
</tool_call>
but I know it."""
SAID = f"{CONSIDERED}\n</think>\n\nIt is sunny."
ASKED: dict[str, Any] = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hello"}],
    "tools": [{"type": "function", "function": {"name": "get_weather"}}],
}


def syntax_of(name: ReasoningParser) -> ThoughtSyntax:
    syntax = SYNTAXES[name]
    assert syntax is not None
    return syntax


TAGS, GRANITE = syntax_of("qwen3"), syntax_of("granite")


def serving_of(folder: Path, template: str, **changes: object) -> ServedModel:
    write_model_folder(folder)
    (folder / "chat_template.jinja").write_text(template)
    tokenizer = load_tokenizer(folder)
    fields = {
        "thoughts": choose_thoughts("auto", tokenizer),
        "tool_calls": TOOL_SYNTAXES["qwen3_coder"],
        "max_model_len": 4096,
    }
    return tiny_serving(tokenizer, **{**fields, **changes})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    return serving_of(tmp_path_factory.mktemp("thinks"), THINKS)


# --- text --------------------------------------------------------------------------------------


def split(thoughts: Thoughts, *pieces: str) -> tuple[str, str]:
    reader = ThoughtReader(thoughts)
    splits = [*(reader.feed(piece) for piece in pieces), reader.feed("", ended=True)]
    return "".join(it.thoughts for it in splits), "".join(it.answer for it in splits)


@pytest.mark.parametrize(
    ("syntax", "begins", "text", "expected"),
    [
        (TAGS, Phase.THINKING, "a\nb\n</think>\n\nc\n", ("a\nb", "c\n")),
        (TAGS, Phase.THINKING, "never\ncloses\n", ("never\ncloses", "")),
        (TAGS, Phase.THINKING, "</think>c</think>", ("", "c</think>")),
        (TAGS, Phase.THINKING, "a</thin", ("a</thin", "")),
        (TAGS, Phase.MAY_OPEN, "\n<think>a</think>c", ("a", "c")),
        (TAGS, Phase.MAY_OPEN, "\n no <think>a</think>", ("", "\n no <think>a</think>")),
        (TAGS, Phase.MAY_OPEN, " <thi", ("", " <thi")),
        (TAGS, Phase.OVER, "\n<think>a</think>", ("", "\n<think>a</think>")),
        (
            GRANITE,
            Phase.MAY_OPEN,
            "Here's my thought process:\na\nHere is my response:\nc",
            ("a", "c"),
        ),
        (GRANITE, Phase.MAY_OPEN, "Here is my dog", ("", "Here is my dog")),
    ],
)
def test_marks_part_thoughts_from_the_answer(
    syntax: ThoughtSyntax, begins: Phase, text: str, expected: tuple[str, str]
) -> None:
    assert split(Thoughts(syntax, begins), text) == expected
    assert split(Thoughts(syntax, begins), *text) == expected


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "\n", "</th", "<", "a", " ", "ink>"]))


@given(PIECES, st.sampled_from(Phase), st.data())
def test_any_cut_of_a_text_is_split_as_the_whole(
    pieces: list[str], begins: Phase, data: st.DataObject
) -> None:
    text, thoughts = "".join(pieces), Thoughts(TAGS, begins)
    at = data.draw(st.integers(0, len(text)))
    assert split(thoughts, text[:at], text[at:]) == split(thoughts, text) == split(thoughts, *text)


def test_white_space_before_an_answer_costs_no_more_than_its_length() -> None:
    def cost_of(num_feeds: int) -> float:
        reader = ThoughtReader(Thoughts(syntax_of("qwen3"), Phase.MAY_OPEN))
        began = time.thread_time()
        for _ in range(num_feeds):
            assert reader.feed(" " * 1000) == ("", "")
        assert reader.feed("<thin") == ("", "")
        cost = time.thread_time() - began
        assert reader.feed("g") == ("", " " * 1000 * num_feeds + "<thing")
        return cost

    assert cost_of(3000) < 30 * max(cost_of(300), 0.002)


def test_a_template_or_its_tokens_tell_the_marks(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path)
    assert choose_thoughts("auto", load_tokenizer(folder)) is None
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    core.add_tokens(["</think>"])
    core.save(str(folder / "tokenizer.json"))
    assert choose_thoughts("auto", load_tokenizer(folder)) is TAGS
    assert choose_thoughts("none", load_tokenizer(folder)) is None
    assert choose_thoughts("auto", Tokenizer()) is None


# --- replies -----------------------------------------------------------------------------------


def script_of(served: ServedModel, text: str, reason: FinishReason = FinishReason.STOP) -> Any:
    ids = (*served.tokenizer.encode(text, add_special_tokens=False), 1)
    return outputs_of(ids, per_step=1, finish_reason=reason)


async def ask(served: ServedModel, text: str, **body: Any) -> Any:
    """The whole reply of a model that answers `text`, and what its stream adds up to."""
    generator = ScriptedGenerator(script_of(served, text, body.pop("reason", FinishReason.STOP)))
    async with running(generator, served) as base, client_of(base) as client:
        reply = await client.chat.completions.create(**{**ASKED, **body})
        stream = await client.chat.completions.create(**{**ASKED, **body}, stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    message = reply.choices[0].message
    streamed = ["".join(getattr(it, key, None) or "" for it in deltas) for key in FIELDS]
    assert streamed == [getattr(message, key, None) or "" for key in FIELDS]
    return reply


FIELDS = ("reasoning_content", "reasoning", "content")


async def test_a_call_that_is_only_considered_is_a_thought(served: ServedModel) -> None:
    reply = await ask(served, SAID)
    choice = reply.choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("stop", None)
    assert choice.message.content == "It is sunny."
    assert choice.message.reasoning_content == choice.message.reasoning == CONSIDERED
    usage = reply.usage
    thought = len(served.tokenizer.encode(f"{CONSIDERED}\n</think>", add_special_tokens=False))
    assert usage.completion_tokens_details.reasoning_tokens == thought


async def test_a_call_after_thoughts_that_mention_one_is_read(served: ServedModel) -> None:
    call = "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"
    choice = (await ask(served, f"A <tool_call> it is.\n</think>\n\n{call}")).choices[0]
    assert [it.function.name for it in choice.message.tool_calls] == ["get_weather"]
    assert (choice.message.content, choice.finish_reason) == (None, "tool_calls")
    assert choice.message.reasoning == "A <tool_call> it is."


async def test_thoughts_that_never_end_are_no_content(served: ServedModel) -> None:
    choice = (await ask(served, "Well, well", reason=FinishReason.LENGTH)).choices[0]
    assert (choice.message.content, choice.finish_reason) == (None, "length")
    assert choice.message.reasoning.startswith("Well, well")


async def test_thoughts_are_left_out_where_nobody_wants_them(served: ServedModel) -> None:
    reply = await ask(served, SAID, extra_body={"include_reasoning": False})
    message = reply.choices[0].message
    assert message.content == "It is sunny." and not hasattr(message, "reasoning")
    assert reply.usage.completion_tokens_details.reasoning_tokens > 0
    silent = replace(served, thoughts=None)
    assert (await ask(silent, "hm</think>\n\nyes")).choices[
        0
    ].message.content == "hm</think>\n\nyes"


# --- grammars ----------------------------------------------------------------------------------


def bound_serving(folder: Path, special: bool) -> ServedModel:
    serving_of(folder, THINKS)
    core = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    add = core.add_special_tokens if special else core.add_tokens
    add(["<think>", "</think>"])
    core.save(str(folder / "tokenizer.json"))
    return tiny_serving(load_tokenizer(folder), thoughts=TAGS, vocab_size=302, max_model_len=4096)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    "asked",
    [
        {"response_format": {"type": "json_object"}},
        {"structured_outputs": {"regex": r"\{[^a-z]*\}"}},
        {"structured_outputs": {"choice": ["{}", '{"é": [1]}']}},
    ],
)
def test_a_grammar_binds_what_follows_the_thoughts(
    tmp_path: Path, special: bool, asked: dict[str, Any]
) -> None:
    """Thoughts are free, their end is the first mark, and an answer without any is bound too."""
    served = bound_serving(tmp_path, special)
    tokenizer = served.tokenizer
    core = (tmp_path / "tokenizer.json").read_text()
    judge = llguidance.LLTokenizer(core, 302, [1])
    body = msgspec.json.encode({"messages": ASKED["messages"], **asked})
    bare = plan_chat(body, replace(served, thoughts=None)).requests[0].sampling.grammar

    def takes(grammar: str, text: str) -> bool:
        matcher = llguidance.LLMatcher(judge, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids = list(tokenizer.encode(text, add_special_tokens=False))
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    opened = plan_chat(body, served).requests[0].sampling.grammar
    assert takes(opened, "so {x}\n</think>\n\n{}") and takes(opened, "</think>{}")
    assert not takes(opened, "{}") and not takes(opened, "so</think>{x}")
    assert not takes(opened, "so</think>x</think>{}")
    may_open = after_thoughts(bare, Thoughts(TAGS, Phase.MAY_OPEN), tokenizer)
    assert takes(may_open, "<think>\nso {</think>{}") and takes(may_open, "{}")
    assert not takes(may_open, "so</think>{}") and not takes(may_open, "<think>x{}")
    both = plan_chat(body, replace(served, grammar_binds_thoughts=True)).requests[0]
    assert both.sampling.grammar == bare


def test_a_grammar_too_large_with_its_thoughts_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="smaller"):
        after_thoughts("a" * MAX_GRAMMAR_CHARS, Thoughts(TAGS, Phase.THINKING), Tokenizer())


CALL = "<tool_call>\n<function=get_weather>\n</function>\n</tool_call>"
NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize("has_tokens", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", NAMED], ids=["auto", "required", "named"])
async def test_a_call_comes_after_thoughts_whoever_asks_for_it(
    tmp_path: Path, choice: object, has_tokens: bool
) -> None:
    """The prompt opens no thoughts, the family always does; a forced call binds what follows."""
    served = serving_of(tmp_path, CHATML, thoughts=SYNTAXES["deepseek_r1"])
    core = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    if has_tokens:
        core.add_special_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
        core.save(str(tmp_path / "tokenizer.json"))
    served = replace(served, tokenizer=load_tokenizer(tmp_path), vocab_size=304)
    text = f"I may {CALL}.\n</think>\n\n{CALL}"
    found = (await ask(served, text, tool_choice=choice)).choices[0]
    assert (found.finish_reason, len(found.message.tool_calls)) == ("tool_calls", 1)
    assert (found.message.content, found.message.reasoning) == (None, f"I may {CALL}.")
    if choice == "auto":
        return
    plan = plan_chat(msgspec.json.encode({**ASKED, "tool_choice": choice}), served)
    judge = llguidance.LLTokenizer(core.to_str(), 304, [1])
    for said, fits in (
        (f"I may.</think>\n\n{CALL}", True),
        (CALL, False),
        ("I may.</think>\n\nNo.", False),
    ):
        matcher = llguidance.LLMatcher(judge, plan.requests[0].sampling.grammar, log_level=0)
        ids = list(served.tokenizer.encode(said, add_special_tokens=False))
        taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert taken is fits, said


# --- requests ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "begins"),
    [
        ({}, Phase.THINKING),
        ({"chat_template_kwargs": {"enable_thinking": False}}, Phase.OVER),
        ({"reasoning_effort": "none"}, Phase.OVER),
        ({"reasoning_effort": "low"}, Phase.THINKING),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            Phase.THINKING,
        ),
        ({"messages": [{"role": "user", "content": "say <think>"}]}, Phase.THINKING),
    ],
)
def test_the_prompt_tells_where_an_output_begins(
    tmp_path: Path, body: dict[str, Any], begins: Phase
) -> None:
    served = serving_of(tmp_path, SWITCH)
    plan = plan_chat(msgspec.json.encode({**ASKED, **body}), served)
    assert plan.thoughts == Thoughts(TAGS, begins)


def test_what_a_user_says_opens_no_thoughts(tmp_path: Path) -> None:
    served = serving_of(tmp_path, CHATML, thoughts=TAGS)
    asked = {"messages": [{"role": "user", "content": "hello <think>\n"}]}
    plan = plan_chat(msgspec.json.encode(asked), served)
    assert plan.thoughts == Thoughts(TAGS, Phase.MAY_OPEN)
    always = replace(served, thoughts=SYNTAXES["deepseek_r1"])
    thoughts = plan_chat(msgspec.json.encode(asked), always).thoughts
    assert thoughts is not None and thoughts.begins is Phase.THINKING


@pytest.mark.parametrize(
    ("content", "begins"),
    [("<think>\nso f", Phase.THINKING), ("<think>a</think>so", Phase.OVER), ("so", Phase.MAY_OPEN)],
)
def test_a_continued_message_tells_it_by_its_own_text(
    tmp_path: Path, content: str, begins: Phase
) -> None:
    served = serving_of(tmp_path, CHATML, thoughts=TAGS)
    turns = [*ASKED["messages"], {"role": "assistant", "content": content}]
    body = {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}
    assert plan_chat(msgspec.json.encode(body), served).thoughts == Thoughts(TAGS, begins)


@pytest.mark.parametrize(
    ("turn", "told"),
    [
        ({"content": None, "reasoning_content": "hm"}, "hm"),
        ({"reasoning": "hm"}, "hm"),
        ({"content": None}, None),
        ({}, None),
    ],
)
def test_turns_that_only_thought_go_back_to_the_template(
    tmp_path: Path, turn: dict[str, Any], told: str | None
) -> None:
    served = serving_of(tmp_path, SWITCH)
    turns = [*ASKED["messages"], {"role": "assistant", **turn}, *ASKED["messages"]]
    plan = plan_chat(msgspec.json.encode({"messages": turns}), served)
    text = served.tokenizer.decode(plan.prompt_of(0)).partition("assistant\n<think>")[0]
    seen = json.loads(text)[1]
    assert seen["content"] == "" and seen.get("reasoning_content") == seen.get("reasoning") == told


def test_effort_reaches_templates_that_read_it_and_hurts_no_other(tmp_path: Path) -> None:
    body = msgspec.json.encode({**ASKED, "reasoning_effort": "low"})
    served = serving_of(tmp_path, "{{ reasoning_effort }}")
    assert served.tokenizer.decode(plan_chat(body, served).prompt_of(0)) == "low"
    served = serving_of(tmp_path, "{{ 'no effort' }}")
    assert served.tokenizer.decode(plan_chat(body, served).prompt_of(0)) == "no effort"


def test_marks_of_plain_words_part_a_grammar_as_well(tmp_path: Path) -> None:
    served = serving_of(tmp_path, CHATML, thoughts=GRANITE)
    body = {"messages": ASKED["messages"], "structured_outputs": {"choice": ["yes"]}}
    grammar = plan_chat(msgspec.json.encode(body), served).requests[0].sampling.grammar
    judge = llguidance.LLTokenizer((tmp_path / "tokenizer.json").read_text(), 300, [1])
    opening, closing = GRANITE.starts[1], GRANITE.ends[1]
    for text, fits in (
        ("yes", True),
        (f"{opening}\nWell.\n{closing}\nyes", True),
        (f"{opening}\nWell.\nyes", False),
        ("Here is yes", False),
    ):
        matcher = llguidance.LLMatcher(judge, grammar, log_level=0)
        ids = list(served.tokenizer.encode(text, add_special_tokens=False))
        taken = matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()
        assert taken is fits, text
