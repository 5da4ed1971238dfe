"""Token ids to text, step by step, never half a character.

Knows nothing of the tokenizer but its decode.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_UNSETTLED = 3
_KEEP = 8
_LIMIT = 24


class Detokenizer:
    """Decodes a bounded window of the last tokens; gives out what is new and final.

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
        piece = text[self._shown : _settled_length(text)]
        self._shown += len(piece)
        if len(self._window) >= _LIMIT:
            self._slide(held=max(0, len(text) - self._shown))
        return piece

    def flush(self) -> str:
        """Give out what was held; the stream has ended."""
        text = self._decode(self._window) if self._window else ""
        piece = text[self._shown :]
        self._shown += len(piece)
        return piece

    def _slide(self, *, held: int) -> None:
        del self._window[:-_KEEP]
        self._shown = max(0, len(self._decode(self._window)) - held)


def _settled_length(text: str) -> int:
    unsettled = 0
    while unsettled < _MAX_UNSETTLED and text.endswith(_REPLACEMENT, 0, len(text) - unsettled):
        unsettled += 1
    return len(text) - unsettled
