"""Tokens of one choice to text, step by step: detokenized, cut at a stop string, without calls."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import NamedTuple

from engine.api.plan import Plan
from engine.api.tokenizer import Tokenizer
from engine.api.tool_calls.reader import Reading, ToolCallReader
from engine.api.tool_calls.syntax import ToolCall
from engine.types import (
    FinishReason,
    GenerateOutput,
    KVTransferParams,
    KVTransferStats,
    PromptLogprobs,
    RoutingDetails,
    TokenId,
    TokenLogprob,
)

_REPLACEMENT = "\ufffd"
_MAX_UNSETTLED = 3
_KEEP = 8
_LIMIT = 24
TOOL_CALLS = "tool_calls"  # why a choice ended, for clients; to nodes it is a stop


class Detokenizer:
    """Decodes a bounded window of the last tokens; returns text that is new and final.

    The window starts with the end of the prompt, because decoders treat the first token of a text
    differently. A character of four bytes may arrive in four tokens: up to three replacement
    characters at the end are held until the next token or `flush` settles them.
    """

    __slots__ = ("_decode", "_shown", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_KEEP:])
        self._shown = len(decode(self._window)) if self._window else 0

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that it completes, possibly empty."""
        self._window.append(token_id)
        text = self._decode(self._window)
        #  text:  0 .. shown         | shown .. settled | settled .. end
        #         returned earlier   | returned now     | held: may be half a character
        settled = len(text)
        while len(text) - settled < _MAX_UNSETTLED and text.endswith(_REPLACEMENT, 0, settled):
            settled -= 1
        piece = text[self._shown : settled]
        self._shown += len(piece)
        # Decoding the whole text for every token would be quadratic: keep the last few tokens.
        if len(self._window) >= _LIMIT:
            held = max(0, len(text) - self._shown)
            del self._window[:-_KEEP]
            self._shown = max(0, len(self._decode(self._window)) - held)
        return piece

    def flush(self) -> str:
        """Return what was held; the stream has ended."""
        text = self._decode(self._window) if self._window else ""
        piece = text[self._shown :]
        self._shown += len(piece)
        return piece


class Matched(NamedTuple):
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None


class StopMatcher:
    """Holds back text that could begin a stop string and cuts the stream at the first match.

    The first match is the one that ends first; of several that end together, the longest. With
    `include` the stop string itself is shown.
    """

    __slots__ = ("_held", "_include", "_stops")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> Matched:
        """Add text; a match that ends in it counts only while `armed`.

        The matcher must not be fed after a match.
        """
        seen, text = len(self._held), self._held + text
        if armed:
            # The held part was searched before: a new match ends after it.
            starts = ((text.find(it, max(0, seen - len(it) + 1)), it) for it in self._stops)
            ends = [(at + len(it), -len(it), it) for at, it in starts if at >= 0]
            if ends:
                end, length, stop = min(ends)
                self._held = ""
                return Matched(text[: end if self._include else end + length], stop)
        # text:  0 .. visible: no stop string can begin here | visible .. end: held
        visible = min((self._possible_start(text, stop) for stop in self._stops), default=len(text))
        self._held = text[visible:]
        return Matched(text[:visible], None)

    def flush(self) -> str:
        """Return what was held back; the stream ended and no stop string came."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _possible_start(text: str, stop: str) -> int:
        """The start of the longest end of `text` that begins `stop`, else the text's length."""
        at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while at >= 0 and not stop.startswith(text[at:]):
            at = text.find(stop[0], at + 1)
        return at if at >= 0 else len(text)


@dataclass(slots=True, frozen=True)
class Delta:
    """News of one choice. `text_offset` is where `text` begins in the choice's whole text.

    The first one brings the prompt's log-probabilities, and its text if that is echoed.
    `first_call` is the number of tool calls before `tool_calls`.
    """

    index: int
    text: str
    text_offset: int
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: str | None = None
    stop_reason: TokenId | str | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: KVTransferParams | None = None
    kv_transfer: KVTransferStats | None = None
    routing: RoutingDetails | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    first_call: int = 0
    prompt_logprobs: PromptLogprobs | None = None


class ChoiceText:
    """Turns the outputs of one choice into deltas."""

    def __init__(self, plan: Plan, index: int, tokenizer: Tokenizer) -> None:
        tokenizer = tokenizer if plan.detokenize else Tokenizer()
        decode = partial(tokenizer.decode, skip_special_tokens=plan.skip_special_tokens)
        self._index = index
        self._echo = plan.echo_of(index)
        self._is_echo_only = plan.is_echo_only
        self._show_stop = plan.include_stop
        self._wants_logprobs = plan.requests[index].sampling.logprobs is not None
        self._min_tokens = plan.requests[index].sampling.min_tokens
        self._detokenizer = Detokenizer(decode, plan.prompt_of(index))
        self._matcher = StopMatcher(plan.stop, include=plan.include_stop)
        self._calls = None if plan.tool_calls is None else ToolCallReader(plan.tool_calls)
        self._num_tokens = 0
        self._num_chars = 0

    def take(self, output: GenerateOutput) -> Delta:
        """Delta of one output; a stop string ends the choice although the output does not."""
        text, num_used, stop = ("", 0, None) if self._is_echo_only else self._read(output)
        finish_reason = output.finish_reason if stop is None else FinishReason.STOP
        first_call = 0 if self._calls is None else self._calls.num_calls
        text, calls = self._without_calls(text, ended=finish_reason is not None)
        text, self._echo = self._echo + text, ""
        offset, self._num_chars = self._num_chars, self._num_chars + len(text)
        logprobs = (output.logprobs or ()) if self._wants_logprobs else ()
        # An answer that was cut off stays cut off, whatever it called before.
        has_stopped_to_call = finish_reason is FinishReason.STOP and (first_call or calls)
        return Delta(
            index=self._index,
            text=text,
            text_offset=offset,
            token_ids=output.token_ids[:num_used],
            logprobs=logprobs[:num_used],
            finish_reason=TOOL_CALLS if has_stopped_to_call else finish_reason,
            stop_reason=output.stop_reason if stop is None else stop,
            num_cached_tokens=output.num_cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
            kv_transfer=output.kv_transfer,
            routing=output.routing,
            tool_calls=calls,
            first_call=first_call,
            prompt_logprobs=output.prompt_logprobs,
        )

    def _without_calls(self, text: str, *, ended: bool) -> Reading:
        """Content and tool calls of new text; where calls are not read all of it is content."""
        if self._calls is None:
            return Reading(text, ())
        found = self._calls.feed(text)
        if not ended:
            return found
        last = self._calls.flush()
        return Reading(found.text + last.text, found.calls + last.calls)

    def _read(self, output: GenerateOutput) -> tuple[str, int, str | None]:
        """Text of the output, number of tokens used, and the stop string that cut them."""
        shown = output.token_ids
        if output.finish_reason is FinishReason.STOP and not self._show_stop:
            shown = shown[:-1]  # the token that stopped the choice
        text = ""
        for num_used, token_id in enumerate(shown, start=1):
            self._num_tokens += 1
            matched = self._match(self._detokenizer.push(token_id))
            text += matched.text
            if matched.stop is not None:
                return text, num_used, matched.stop
        if output.finish_reason is None:
            return text, len(output.token_ids), None
        matched = self._match(self._detokenizer.flush())
        text += matched.text + self._matcher.flush()
        return text, len(output.token_ids), matched.stop

    def _match(self, text: str) -> Matched:
        """Stop strings count only in text after the first `min_tokens` tokens."""
        return self._matcher.feed(text, armed=self._num_tokens > self._min_tokens)


def joined(deltas: Sequence[Delta]) -> Delta:
    """All deltas of a choice in one; the last one says why the choice ended."""
    return replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        text_offset=0,
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        tool_calls=tuple(chain.from_iterable(delta.tool_calls for delta in deltas)),
        first_call=0,
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
