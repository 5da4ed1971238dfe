"""The grammar of an answer that must call a tool."""

from collections.abc import Mapping, Sequence
from typing import Any

from llguidance import LLMatcher

from engine.errors import InvalidRequestError
from engine.types import MAX_GRAMMAR_CHARS
from serving.api.loose_schema import closed
from serving.api.tokenizer import Tokenizer
from serving.api.tool_calls.schema_types import lookup
from serving.api.tool_calls.syntax import Parameters, ToolCallSyntax


def forced_grammar(
    syntax: ToolCallSyntax,
    names: Sequence[str],
    parameters: Parameters,
    *,
    is_parallel: bool,
    tokenizer: Tokenizer,
) -> str:
    """Nothing but calls of `names`, one or, with `is_parallel`, several.

    Markers that are tokens of `tokenizer` are written as these, as the model was trained to.

    Raises InvalidRequestError for a schema that no grammar can be made of, and for a grammar that
    is too large. The node that follows it finds out whether it can be compiled.
    """
    start, end = tokenizer.in_grammar(syntax.start), tokenizer.in_grammar(syntax.end)
    rules = ['start: call ("\\n" call)*' if is_parallel else "start: call"]
    calls = " | ".join(f"tool_{number}" for number in range(len(names)))
    rules.append(f'call: {start} "\\n" ({calls}) "\\n" {end}')
    for number, name in enumerate(names):
        rules += _call_rules(syntax, f"tool_{number}", name, schema=parameters.get(name) or {})
    grammar = str(LLMatcher.grammar_from_lark("\n".join(rules)))
    # Here, where it still has a name: the nodes would only say that a grammar is too long.
    if len(grammar) > MAX_GRAMMAR_CHARS:
        raise InvalidRequestError(
            f"tools: the grammar of the calls that tool_choice forces has {len(grammar)} "
            f"characters, {MAX_GRAMMAR_CHARS} are allowed: send fewer tools or smaller parameters, "
            "name one tool, or use tool_choice=auto",
            param="tools",
        )
    return grammar


def _call_rules(
    syntax: ToolCallSyntax, rule: str, name: str, *, schema: Mapping[str, Any]
) -> list[str]:
    """Raises InvalidRequestError for what the rules of arguments cannot be made of."""
    properties, required = (lookup(schema, schema, key) for key in ("properties", "required"))
    if not isinstance(properties, dict | None):
        raise _wrong(name, f"have properties={repr(properties)[:80]}: make it an object of schemas")
    is_list = isinstance(required, list) and all(isinstance(it, str) for it in required)
    if required is not None and not is_list:
        raise _wrong(name, f"have required={repr(required)[:80]}: make it an array of names")
    try:
        # As vLLM: a model that may write any key may never end, and no tool asks for that.
        return syntax.rules(rule, name, closed(schema))
    except RecursionError as error:
        raise _wrong(name, "are nested too deeply: flatten them") from error


def _wrong(name: str, told: str) -> InvalidRequestError:
    return InvalidRequestError(f"tools: the parameters of tool {name[:80]!r} {told}", param="tools")
