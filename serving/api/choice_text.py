"""Tokens of one choice to text, step by step: detokenized, cut at a stop string, without calls."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from itertools import chain
from typing import NamedTuple

import msgspec

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
from serving.api.plan import Plan
from serving.api.reasoning import Phase, ThoughtReader
from serving.api.tokenizer import Tokenizer
from serving.api.tool_calls import ToolCallReader
from serving.api.tool_syntaxes import ToolCall

_REPLACEMENT = "\ufffd"
_MAX_UNSETTLED = 3  # characters
_MAX_HELD = 4  # tokens: a character has no more bytes
_KEEP = 8
_LIMIT = 24
TOOL_CALLS = "tool_calls"  # why a choice ended, for clients; to nodes it is a stop


class Detokenizer:
    """Decodes a bounded window of the last tokens; returns text that is new and final.

    The window starts with the end of the prompt, because decoders treat the first token of a text
    differently. A character of four bytes may arrive in four tokens: text that ends in half a
    character is held until the next token or `flush` settles it. Decoders with byte fallback take
    a run of bytes as one: until it is whole, all of it is replaced, what was shown of it too.
    """

    __slots__ = ("_decode", "_num_held", "_num_settled", "_shown", "_text", "_window")

    def __init__(self, decode: Callable[[Sequence[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._num_held = 0  # tokens that added text since all of it was settled
        self._window = self._tail_of(context)
        self._num_settled = len(self._window)  # tokens of the window whose text was shown
        self._text = self._shown = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        """Add one token; returns the text that it completes, possibly empty."""
        self._window.append(token_id)
        before, self._text = self._text, self._decode(self._window)
        if self._text.startswith(self._shown):
            # Bytes that become fewer characters are whole: U+FFFD at their end is meant.
            has_joined = len(self._text) < len(before)
            has_news = len(self._text) > len(self._shown)
            if has_joined or not has_news or not self._text.endswith(_REPLACEMENT):
                return self._show(len(self._text))
        self._num_held += self._text != before
        may_wait = self._num_held < _MAX_HELD and len(self._window) < 2 * _LIMIT
        if may_wait and self._text.endswith(_REPLACEMENT):
            return ""
        # Held for longer, it is no character, or one that others follow without a pause.
        self._leave_broken_run()
        return self._show(self._end_of_settled())

    def flush(self) -> str:
        """Return what was held; the stream has ended."""
        self._leave_broken_run()
        return self._show(len(self._text))

    def _end_of_settled(self) -> int:
        #  text:  0 .. shown         | shown .. settled | settled .. end
        #         returned earlier   | returned now     | held: may be half a character
        end = len(self._text)
        while len(self._text) - end < _MAX_UNSETTLED and self._text.endswith(_REPLACEMENT, 0, end):
            end -= 1
        return end

    def _show(self, end: int) -> str:
        piece = self._text[len(self._shown) : end]
        self._shown += piece
        if end == len(self._text):
            self._num_held, self._num_settled = 0, len(self._window)
        # Decoding the whole text for every token would be quadratic: keep the last few tokens.
        if len(self._window) >= _LIMIT:
            held = len(self._text) - len(self._shown)
            self._window = self._tail_of(self._window)
            self._text = self._decode(self._window)
            self._shown = self._text[: max(0, len(self._text) - held)]
            self._num_settled = 0 if held else len(self._window)
        return piece

    def _leave_broken_run(self) -> None:
        """Starts the window anew, where bytes that cannot be read replaced what was shown."""
        if self._text.startswith(self._shown):
            return
        num_shown = len(self._shown) - len(self._decode(self._window[: self._num_settled]))
        self._window, self._num_settled = self._window[self._num_settled :], 0
        self._text = self._decode(self._window)
        self._shown = self._text[: max(0, num_shown)]

    def _tail_of(self, tokens: Sequence[int]) -> list[int]:
        """The last few of `tokens`, from the start of a character on if one starts there."""
        last = list(tokens[-2 * _LIMIT :])
        counts = range(min(_KEEP, len(last)), 0, -1)
        for count in counts:
            if not self._decode(last[-count:]).startswith(_REPLACEMENT):
                return last[-count:]
        # U+FFFD that is meant: a start within a character would make more of it.
        text = self._decode(last) if last else ""
        for count in counts:
            if text == self._decode(last[:-count]) + self._decode(last[-count:]):
                return last[-count:]
        return last[-_KEEP:]


class Matched(NamedTuple):
    """Text that may be shown now, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None


class StopMatcher:
    """Holds back text that could begin a stop string and cuts the stream at the first match.

    The first match is the one that ends first; of several that end together, the longest. With
    `include` the stop string itself is shown.
    """

    __slots__ = ("_followers", "_held", "_include")

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._followers = [_StopFollower(stop) for stop in stops]
        self._include = include
        self._held = ""

    def feed(self, text: str, *, armed: bool = True) -> Matched:
        """Add text; a match at its end counts only while `armed`. No call may follow a match."""
        begin, text = len(self._held), self._held + text
        found = ((it.feed(text, begin, armed=armed), it.stop) for it in self._followers)
        ends = [(end, -len(stop), stop) for end, stop in found if end is not None]
        if ends:
            end, length, stop = min(ends)
            self._held = ""
            return Matched(text[: end if self._include else end + length], stop)
        # text:  0 .. visible: no stop string can begin here | visible .. end: held
        visible = len(text) - max((it.num_matched for it in self._followers), default=0)
        self._held = text[visible:]
        return Matched(text[:visible], None)

    def flush(self) -> str:
        """Return what was held back; the stream ended and no stop string came."""
        held, self._held = self._held, ""
        return held


@lru_cache(maxsize=256)
def _borders(stop: str) -> tuple[int, ...]:
    """By length - 1 of a beginning of `stop`: of the longest shorter one with which that ends."""
    borders, length = [0], 0
    for char in stop[1:]:
        while length and stop[length] != char:
            length = borders[length - 1]
        length += stop[length] == char
        borders.append(length)
    return tuple(borders)


class _StopFollower:
    """One stop string, searched as by Knuth, Morris and Pratt: no character is looked at again.

    `num_matched`: characters at the end of the text so far that begin it.
    """

    __slots__ = ("_borders", "num_matched", "stop")

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def feed(self, text: str, begin: int, *, armed: bool) -> int | None:
        """Go on with `text` from `begin` on; where the first match ends, if `armed`."""
        stop, matched, at = self.stop, self.num_matched, begin
        while at < len(text):
            if not matched and (at := text.find(stop[0], at)) < 0:
                break
            while matched and stop[matched] != text[at]:
                matched = self._borders[matched - 1]
            matched += stop[matched] == text[at]
            at += 1
            if matched == len(stop):
                matched = self._borders[-1]
                if armed:
                    return at
        self.num_matched = matched
        return None


class Delta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """News of one choice.

    `text_offsets`, of tokens with log-probabilities: where their text begins in the whole text of
    the choice. The first one brings the prompt's log-probabilities, and its text if that is echoed.
    `first_call` is the number of tool calls before `tool_calls`. `reasoning`: text of thoughts,
    which come before `text` and calls. Each token makes one of these.
    """

    index: int
    text: str
    token_ids: tuple[TokenId, ...]
    logprobs: tuple[TokenLogprob, ...]
    text_offsets: tuple[int, ...] = ()
    finish_reason: str | None = None
    stop_reason: TokenId | str | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: KVTransferParams | None = None
    kv_transfer: KVTransferStats | None = None
    routing: RoutingDetails | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    first_call: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    reasoning: str = ""
    num_reasoning_tokens: int = 0


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
        self._thoughts = None if plan.thoughts is None else ThoughtReader(plan.thoughts)
        self._shows_thoughts = plan.shows_thoughts
        self._calls = None if plan.tool_calls is None else ToolCallReader(plan.tool_calls)
        self._num_tokens = 0
        self._num_chars = len(self._echo)

    def take(self, output: GenerateOutput) -> Delta:
        """Delta of one output; a stop string ends the choice although the output does not."""
        offsets: list[int] = []
        text, num_used, stop = "", 0, None
        was_thinking = self._is_thinking
        if not self._is_echo_only:
            text, num_used, stop = self._read(output, offsets)
        finish_reason = output.finish_reason if stop is None else FinishReason.STOP
        ended = finish_reason is not None
        thoughts, first_call = "", 0
        calls: tuple[ToolCall, ...] = ()
        if self._thoughts is not None:
            thoughts, text = self._thoughts.feed(text, ended=ended)
        if self._calls is not None:
            first_call = self._calls.num_calls
            text, calls = self._calls.feed(text, ended=ended)
        text, self._echo = self._echo + text, ""
        logprobs = (output.logprobs or ()) if self._wants_logprobs else ()
        # An answer that was cut off stays cut off, whatever it called before.
        has_stopped_to_call = finish_reason is FinishReason.STOP and (first_call or calls)
        return Delta(
            index=self._index,
            text=text,
            token_ids=output.token_ids[:num_used],
            logprobs=logprobs[:num_used],
            text_offsets=tuple(offsets[:num_used]) if logprobs else (),
            finish_reason=TOOL_CALLS if has_stopped_to_call else finish_reason,
            stop_reason=output.stop_reason if stop is None else stop,
            num_cached_tokens=output.num_cached_tokens,
            kv_transfer_params=output.kv_transfer_params,
            # Causes are for operators: clients are told what was moved.
            kv_transfer=output.kv_transfer if output.was_pulled else None,
            routing=output.routing,
            tool_calls=calls,
            first_call=first_call,
            prompt_logprobs=output.prompt_logprobs,
            reasoning=thoughts if self._shows_thoughts else "",
            num_reasoning_tokens=num_used if was_thinking or self._is_thinking else 0,
        )

    @property
    def _is_thinking(self) -> bool:
        return self._thoughts is not None and self._thoughts.phase is Phase.THINKING

    def _read(self, output: GenerateOutput, offsets: list[int]) -> tuple[str, int, str | None]:
        """Text of the output, number of tokens used, and the stop string that cut them.

        Adds to `offsets` where each token's text begins, whatever of it is still held back.
        """
        shown = output.token_ids
        if output.finish_reason is FinishReason.STOP and not self._show_stop:
            shown = shown[:-1]  # the token that stopped the choice
        text = ""
        for num_used, token_id in enumerate(shown, start=1):
            self._num_tokens += 1
            offsets.append(self._num_chars)
            piece = self._detokenizer.push(token_id)
            self._num_chars += len(piece)
            matched = self._match(piece)
            text += matched.text
            if matched.stop is not None:
                return text, num_used, matched.stop
        offsets += [self._num_chars] * (len(output.token_ids) - len(shown))
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
    return msgspec.structs.replace(
        deltas[-1],
        text="".join(delta.text for delta in deltas),
        text_offsets=tuple(chain.from_iterable(delta.text_offsets for delta in deltas)),
        token_ids=tuple(chain.from_iterable(delta.token_ids for delta in deltas)),
        logprobs=tuple(chain.from_iterable(delta.logprobs for delta in deltas)),
        tool_calls=tuple(chain.from_iterable(delta.tool_calls for delta in deltas)),
        first_call=0,
        reasoning="".join(delta.reasoning for delta in deltas),
        num_reasoning_tokens=sum(delta.num_reasoning_tokens for delta in deltas),
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
