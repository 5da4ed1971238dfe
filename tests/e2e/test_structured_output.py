"""Grammars and biases across the hand-over: P and D choose as one node does, and keep to them."""

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.nodes.asking import CHAT, ask, question
from tests.support.nodes.pairs import prompt_of
from tests.support.nodes.processes import ServedCluster

PROMPT = list(prompt_of(40, salt=3))
SCHEMA = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "ok": {"type": "boolean"}},
    "required": ["color", "ok"],
    "additionalProperties": False,
}
DATE = "[0-9]{4}-[0-9]{2}"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "seeded": {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2},
}


def is_schema(text: str) -> bool:
    value = json.loads(text)
    assert value.keys() == {"color", "ok"}
    return value["color"] in ("red", "blue") and isinstance(value["ok"], bool)


GRAMMARS: dict[str, tuple[dict[str, Any], Callable[[str], object]]] = {
    "schema": ({"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
               is_schema),
    "guided json": ({"guided_json": json.dumps(SCHEMA)}, is_schema),
    "regex": ({"structured_outputs": {"regex": DATE}}, re.compile(DATE).fullmatch),
    "choice": ({"structured_outputs": {"choice": ["yes", "no"]}}, re.compile("yes|no").fullmatch),
    "choice, too short": ({"guided_choice": ["yes", "no"], "min_tokens": 30},
                          re.compile("yes|no").fullmatch),
    "lark": ({"guided_grammar": 'start: "a" "b"+ "c"'}, re.compile("ab+c").fullmatch),
    "gbnf": ({"guided_grammar": 'root ::= "a" [0-9] "b"'}, re.compile("a[0-9]b").fullmatch),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
async def test_the_output_keeps_to_the_grammar_as_on_one_node(
    served: ServedCluster, name: str
) -> None:
    asked, fits = GRAMMARS[name]
    for sampling in SAMPLING.values():
        body = question(PROMPT, max_tokens=200, ignore_eos=False, logprobs=2, **asked, **sampling)
        pair, alone = await ask(served.proxy.url, body), await ask(served.d.url, body)
        assert pair.token_ids == alone.token_ids
        assert pair.body["choices"][0]["logprobs"] == alone.body["choices"][0]["logprobs"]
        assert pair.body["choices"][0]["finish_reason"] == "stop"
        assert fits(pair.body["choices"][0]["text"])
        assert pair.token_ids[-1] not in pair.token_ids[:-1], "the end comes once"


@pytest.mark.parametrize("sampling", SAMPLING)
async def test_biases_and_allowed_tokens_hold_on_both_nodes(
    served: ServedCluster, sampling: str
) -> None:
    plain = question(PROMPT, **SAMPLING[sampling])
    free = (await ask(served.d.url, plain)).token_ids
    for rule in (
        {"logit_bias": {str(free[0]): -100}},
        {"logit_bias": {"7": 100}},
        {"allowed_token_ids": [7, 8, 9]},
    ):
        body = {**plain, **rule}
        pair, alone = await ask(served.proxy.url, body), await ask(served.d.url, body)
        assert pair.token_ids == alone.token_ids
        if "allowed_token_ids" in rule:
            assert set(pair.token_ids) <= {7, 8, 9}
        elif "7" in rule["logit_bias"]:
            assert pair.token_ids == [7] * 10
        else:
            assert free[0] not in pair.token_ids


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_json": {"type": "nothing"}}, "guided_json", "nothing"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice", "give one"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema.schema"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "length >= 1"),
        ({"guided_regex": "a", "allowed_token_ids": [7]}, "allowed_token_ids", "give one"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "outside"),
        ({"logit_bias": {"5": 101}}, "logit_bias", "100"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids", "outside"),
        ({"allowed_token_ids": []}, "allowed_token_ids", "length >= 1"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_a_wrong_rule_names_key_and_cause(
    served: ServedCluster, body: dict[str, Any], param: str, message: str
) -> None:
    for url in (served.proxy.url, served.d.url):
        error = (await ask(url, question(PROMPT, **body))).error(400)
        assert message in error["message"]
        assert error["param"].startswith(param)


async def test_a_chat_without_bounds_is_unchanged(served: ServedCluster) -> None:
    messages = [{"role": "user", "content": "hello"}]
    chat = {"messages": messages, "max_tokens": 5, "temperature": 0, "return_token_ids": True}
    plain = await ask(served.proxy.url, chat, path=CHAT)
    neutral = {**chat, "response_format": {"type": "text"}, "logit_bias": {}}
    assert (await ask(served.proxy.url, neutral, path=CHAT)).token_ids == plain.token_ids


async def test_bad_words_never_come_on_either_node(served: ServedCluster) -> None:
    free = (await ask(served.proxy.url, question(PROMPT, max_tokens=40))).token_ids
    texts = [await text_of(served, token_id) for token_id in free]
    place, word = next((place, text) for place, text in enumerate(texts) if text)
    asked = question(PROMPT, max_tokens=40, bad_words=[word])
    pair, alone = await ask(served.proxy.url, asked), await ask(served.d.url, asked)
    assert pair.token_ids == alone.token_ids
    assert pair.token_ids[:place] == free[:place]
    assert free[place] not in pair.token_ids


async def text_of(served: ServedCluster, token_id: int) -> str | None:
    """The text that becomes this token again, if there is one."""
    told = await ask(served.d.url, {"tokens": [token_id]}, path="/detokenize")
    asked = {"prompt": told.body["prompt"], "add_special_tokens": False}
    again = await ask(served.d.url, asked, path="/tokenize")
    return asked["prompt"] if again.body["tokens"] == [token_id] else None
