"""Grammars that bind a request's output: compiled and followed by llguidance.

A grammar is one string, llguidance's JSON form; the API makes it from a JSON schema, a regular
expression, a list of choices or a Lark grammar. Every node that works on a request compiles it
again: what it allows next depends on the output tokens alone, so P and D agree.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import cached_property, partial
from typing import Final, TypeVar

import llguidance

from engine.errors import InvalidRequestError, OverloadedError
from engine.types import TokenId

WHITE_SPACE = r"\n?[ \t]{0,16}"
"""Between two parts of a JSON text: a small model may like white space too much to ever end."""

# An ambiguous grammar has more and more readings of one text, and every token takes longer, on the
# engine's thread. Half of llguidance's own bound keeps a token within tens of milliseconds, and a
# tenth of its fuel for the first token keeps that within 0.1 s.
_LIMITS = llguidance.LLParserLimits(
    max_items_in_row=1000, initial_lexer_fuel=100_000, verbose_errors=False
)
_STACK_BYTES: Final = 256 * 2**20
"""llguidance recurses once per rule or reference; the longest grammars that are taken need less.
Of a stack only what is touched takes memory."""
_AT_ONCE: Final = 2
COMPILE_S: Final = 10.0

_T = TypeVar("_T")
_stack_size = threading.Lock()


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
    """Compiles grammars for the tokens of one tokenizer; any thread.

    `tokenizer_json`: makes its tokenizer.json with all tokens, None without any. `vocab_size`:
    logits per token, which may be more or fewer than the tokenizer has.
    """

    def __init__(
        self,
        tokenizer_json: Callable[[], str | None],
        vocab_size: int,
        eos_token_ids: Iterable[TokenId],
    ) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def compile(self, grammar: str, output: Sequence[TokenId] = ()) -> Matcher:
        """As `matcher`, on a thread of its own.

        Raises InvalidRequestError also where it takes longer than `COMPILE_S`, and OverloadedError
        where no turn comes so soon.
        """
        try:
            async with asyncio.timeout(COMPILE_S):
                await self._turns.acquire()
        except TimeoutError as error:
            raise OverloadedError("other grammars are being compiled: try again") from error
        try:
            work = _start_deep(partial(self.matcher, grammar, output))
        except RuntimeError:  # the system has no thread left
            self._turns.release()
            raise
        compiling = asyncio.wrap_future(work)
        compiling.add_done_callback(self._end_turn)
        try:
            async with asyncio.timeout(COMPILE_S):
                return await asyncio.shield(compiling)
        except TimeoutError as error:
            raise InvalidRequestError(
                f"the grammar takes longer than {COMPILE_S:g} s to compile: make it smaller"
            ) from error

    def _end_turn(self, compiling: "asyncio.Future[Matcher]") -> None:
        # A thread cannot be stopped: one that nobody waits for keeps its turn until it ends.
        self._turns.release()
        if not compiling.cancelled():
            compiling.exception()  # asyncio logs one that nobody has looked at

    def matcher(self, grammar: str, output: Sequence[TokenId] = ()) -> Matcher:
        """The matcher after `output`; needs a deep stack.

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
        matcher = Matcher(inner)
        # The first token costs the most, and is a first sight of a grammar that nothing can follow.
        if not _goes_on(inner.deep_copy(), matcher.allowed()):
            raise InvalidRequestError("the grammar is too complex to be followed: make it simpler")
        return matcher

    @cached_property
    def _tokenizer(self) -> llguidance.LLTokenizer:
        # Built with the first grammar: it takes a second for large vocabularies.
        text = self._tokenizer_json()
        if text is None:
            raise InvalidRequestError(
                "a grammar needs a tokenizer and this model folder has no tokenizer.json",
                code="no_tokenizer",
            )
        text = _within_vocabulary(text, self._vocab_size)
        try:
            return llguidance.LLTokenizer(text, self._vocab_size, self._eos_token_ids)
        except ValueError as error:
            raise InvalidRequestError(f"this model's tokens take no grammar: {error}") from error


def _within_vocabulary(text: str, vocab_size: int) -> str:
    """The tokenizer without added tokens that no logit stands for, which llguidance refuses."""
    fields = json.loads(text)
    tokens = fields.get("added_tokens") or []
    fields["added_tokens"] = [token for token in tokens if token["id"] < vocab_size]
    return text if len(fields["added_tokens"]) == len(tokens) else json.dumps(fields)


def json_grammar(schema: str) -> str:
    """The grammar of a JSON text. Raises ValueError for a schema that is no JSON object."""
    return llguidance.LLMatcher.grammar_from_json_schema(
        schema, defaults={"whitespace_flexible": True, "whitespace_pattern": WHITE_SPACE}
    )


def check_grammar(grammar: str, param: str) -> None:
    """Raises InvalidRequestError that names `param` unless `grammar` can be compiled."""
    validate = partial(llguidance.LLMatcher.validate_grammar, grammar, None, limits=_LIMITS)
    if problem := _start_deep(validate).result():
        raise InvalidRequestError(f"{param} is no grammar: {problem.strip()}", param=param)


def _goes_on(inner: llguidance.LLMatcher, allowed: bytes) -> bool:
    """Whether one of the `allowed` tokens may really come; `inner` is used up."""
    word = next((place for place, bits in enumerate(allowed) if bits), None)
    if word is None:
        return False
    inner.consume_token(8 * word + (allowed[word] & -allowed[word]).bit_length() - 1)
    return not inner.is_error()


def _start_deep(work: Callable[[], _T]) -> "Future[_T]":
    """Runs `work` on a thread with `_STACK_BYTES`: a stack that overflows ends the process."""
    future: Future[_T] = Future()
    thread = threading.Thread(target=_settle, args=(future, work), name="grammar", daemon=True)
    with _stack_size:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    return future


def _settle(future: "Future[_T]", work: Callable[[], _T]) -> None:
    try:
        future.set_result(work())
    # Broad: whatever it is, the caller raises it.
    except BaseException as error:
        future.set_exception(error)
