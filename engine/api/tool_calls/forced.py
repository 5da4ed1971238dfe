"""The grammar of an answer that must call a tool."""

import json
from collections.abc import Sequence

from llguidance import LLMatcher

from engine.api.tool_calls.syntax import Parameters, ToolCallSyntax
from engine.grammar import check_grammar


def forced_grammar(
    syntax: ToolCallSyntax, names: Sequence[str], parameters: Parameters, *, is_parallel: bool
) -> str:
    """Nothing but calls of `names`, one or, with `is_parallel`, several.

    Raises InvalidRequestError for a schema that no grammar can be made of.
    """
    start, end = json.dumps(syntax.start + "\n"), json.dumps("\n" + syntax.end)
    rules = ['start: call ("\\n" call)*' if is_parallel else "start: call"]
    rules.append(f"call: {start} ({' | '.join(f'tool_{n}' for n in range(len(names)))}) {end}")
    for number, name in enumerate(names):
        rules += syntax.rules(f"tool_{number}", name, parameters.get(name) or {})
    grammar = str(LLMatcher.grammar_from_lark("\n".join(rules)))
    check_grammar(grammar, "tools")
    return grammar
