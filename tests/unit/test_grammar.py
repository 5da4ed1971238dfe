"""Hostile grammars: they are refused, or followed, and hold up nobody else."""

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine import grammar as module
from engine.api.structured_output import GrammarFields, grammar_of
from engine.api.tokenizer import load_tokenizer
from engine.errors import InvalidRequestError, OverloadedError
from engine.grammar import GrammarCompiler, Matcher
from engine.types import MAX_GRAMMAR_CHARS
from tests.tiers import everyday

MODEL = Path("deploy/demo/model")
VOCABULARY, END = 832, 0


def rules(count: int) -> dict[str, str]:
    chain = "\n".join(f"x{number}: x{number + 1}" for number in range(count))
    return {"guided_grammar": f'start: x0\n{chain}\nx{count}: "a"'}


def references(count: int, key: str) -> dict[str, Any]:
    def one(number: int) -> dict[str, object]:
        follows: Any = {"$ref": f"#/$defs/{number + 1}"}
        return {key: {"p": follows} if key == "properties" else [follows]}

    defs = {str(number): one(number) for number in range(count)} | {str(count): {"type": "string"}}
    return {"guided_json": {"$ref": "#/$defs/0", "$defs": defs}}


CHAINS = {
    "rules": rules(18_000),
    "properties": references(4_000, "properties"),
    "allOf": references(5_000, "allOf"),
    "anyOf": references(5_000, "anyOf"),
}
"""Of almost as many characters as are allowed."""


@pytest.mark.parametrize("name", everyday(tuple(CHAINS), ("rules", "allOf")))
async def test_a_chain_of_references_overflows_no_stack(name: str) -> None:
    try:
        made = grammar_of(GrammarFields(**CHAINS[name]))
        assert MAX_GRAMMAR_CHARS // 2 < len(made) <= MAX_GRAMMAR_CHARS
        matcher = await GrammarCompiler(load_tokenizer(MODEL).to_json, VOCABULARY, [END]).compile(
            made
        )
        assert any(matcher.allowed())
    except InvalidRequestError as error:
        assert "too big" in str(error)


def test_a_schema_nested_too_deeply_is_told_so_and_what_to_do() -> None:
    schema: dict[str, Any] = {}
    for _ in range(900):
        schema = {"properties": {"a": schema}}
    with pytest.raises(InvalidRequestError, match="guided_json is nested too deeply: flatten it"):
        grammar_of(GrammarFields(guided_json=schema))


@pytest.mark.parametrize("pattern", ["(((a{100}){100}){100}){100}", "(a?){3000}a{3000}"])
async def test_an_expression_that_nobody_can_follow_is_refused_at_once(pattern: str) -> None:
    """And not at its second token, after the engine has stood still for seconds."""
    made = grammar_of(GrammarFields(guided_regex=pattern))
    with pytest.raises(InvalidRequestError, match="too complex"):
        await GrammarCompiler(load_tokenizer(MODEL).to_json, VOCABULARY, [END]).compile(made)


class Slow(GrammarCompiler):
    """Compiles until it is let go."""

    def __init__(self) -> None:
        super().__init__(load_tokenizer(MODEL).to_json, VOCABULARY, [END])
        self.go_on = threading.Event()

    def matcher(self, grammar: str, output: Sequence[int] = ()) -> Matcher:
        self.go_on.wait(20)
        return super().matcher(grammar, output)


async def test_what_compiles_too_long_is_refused_and_takes_a_turn_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "COMPILE_S", 0.1)
    compiler, made = Slow(), grammar_of(GrammarFields(guided_choice=["a"]))
    slow = await asyncio.gather(*(compiler.compile(made) for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in slow] == [InvalidRequestError] * 2
    with pytest.raises(OverloadedError, match="other grammars"):
        await compiler.compile(made)
    compiler.go_on.set()
    monkeypatch.setattr(module, "COMPILE_S", 10.0)
    assert any((await compiler.compile(made)).allowed())
