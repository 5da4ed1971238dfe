"""Grammars that bind a request's output: compiled and followed by llguidance.

A grammar is one string, llguidance's JSON form; the API makes it from a JSON schema, a regular
expression, a list of choices or a Lark grammar. Every node that works on a request compiles it
again: what it allows next depends on the output tokens alone, so P and D agree.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path

import llguidance

from engine.errors import InvalidRequestError
from engine.types import TokenId

WHITE_SPACE = r"\n?[ \t]{0,16}"
"""Between two parts of a JSON text: a small model may like white space too much to ever end."""

# An ambiguous grammar has more and more readings of one text, and every token takes longer, on the
# engine's thread. Half of llguidance's own bound keeps a token within tens of milliseconds.
_LIMITS = llguidance.LLParserLimits(max_items_in_row=1000, verbose_errors=False)


class Matcher:
    """Follows one request's output; one thread at a time."""

    def __init__(self, inner: llguidance.LLMatcher) -> None:
        self._inner = inner

    def allowed(self) -> bytes:
        """A bit per token of the vocabulary, least significant first: set if it may come next.

        Where the grammar ends, that is the end of text; none once it is too complex to follow,
        so that the request fails: its output must not look whole.
        """
        mask = self._inner.compute_bitmask()
        return bytes(len(mask)) if self._inner.is_error() else mask

    def allows(self, token_id: TokenId) -> bool:
        """True if `token_id` may come next."""
        return self._inner.validate_tokens([token_id]) == 1

    def accept(self, token_id: TokenId) -> None:
        """The output goes on with `token_id`, which was allowed; else nothing may follow."""
        if not self._inner.is_stopped():
            self._inner.consume_token(token_id)


class GrammarCompiler:
    """Compiles grammars for the tokens of one model folder; any thread.

    `vocab_size`: logits per token, which may be more than the tokenizer has.
    """

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[TokenId]) -> None:
        self._path = folder / "tokenizer.json"
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)

    def matcher(self, grammar: str, output: Sequence[TokenId] = ()) -> Matcher:
        """The matcher after `output`.

        Raises InvalidRequestError for a grammar that cannot be compiled, with the cause, or that
        does not allow `output`.
        """
        if not self._eos_token_ids:
            raise InvalidRequestError("a grammar needs a model with an end-of-text token")
        inner = llguidance.LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)
        if inner.is_error():
            raise InvalidRequestError(f"the grammar cannot be compiled: {inner.get_error()}")
        if output and not inner.consume_tokens(list(output)):
            raise InvalidRequestError(
                "output_token_ids: the request's grammar does not allow them",
                param="output_token_ids",
            )
        return Matcher(inner)

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        # Built with the first grammar: it takes a second for large vocabularies.
        if not self._path.is_file():
            raise InvalidRequestError(
                "a grammar needs a tokenizer and this model folder has no tokenizer.json",
                code="no_tokenizer",
            )
        return llguidance.LLTokenizer(
            self._path.read_text(encoding="utf-8"), self._vocab_size, self._eos_token_ids
        )


def json_grammar(schema: str) -> str:
    """The grammar of a JSON text. Raises ValueError for a schema that is no JSON object."""
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
    )


def check_grammar(grammar: str, param: str) -> None:
    """Raises InvalidRequestError that names `param` unless `grammar` can be compiled."""
    if problem := llguidance.LLMatcher.validate_grammar(grammar, None, limits=_LIMITS):
        raise InvalidRequestError(f"{param} is no grammar: {problem.strip()}", param=param)
