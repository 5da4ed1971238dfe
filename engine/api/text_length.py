"""The most characters that one token can stand for, read from a tokenizer.

A text with more characters than a context of such tokens holds is refused before it is tokenized.
That is only sound for tokenizers that drop no characters; all others have no such number.
"""

import json
import unicodedata
from typing import Any

import tokenizers
from tokenizers import models

# A composed character has at most four code points: omega with breathing, accent and iota.
MAX_COMPOSED = 4

_KEEPS_ALL = frozenset(
    {"NFC", "NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace", "Digits"}
)
_SPLITS = frozenset({"Split", "Punctuation"})


class TextLength:
    """`chars_per_token` of one tokenizer; None where a token may stand for any number of them."""

    def __init__(self, core: tokenizers.Tokenizer) -> None:
        parts = [*parts_of(core.normalizer), *parts_of(core.pre_tokenizer)]
        added = core.get_added_tokens_decoder().values()
        vocabulary = core.get_vocab()
        sound = (
            all(map(_keeps_all, parts))
            and not any(token.lstrip or token.rstrip for token in added)
            and _has_all_bytes(core, vocabulary, parts)
        )
        self.chars_per_token = max(map(len, vocabulary)) if sound else None
        self._composes = any(part["type"] == "NFC" for part in parts)

    def exceeds(self, text: str, max_chars: int) -> bool:
        """Whether `text` is longer, also once its accents are composed as the tokenizer does."""
        if len(text) <= max_chars:
            return False
        if not self._composes or text.isascii() or len(text) > MAX_COMPOSED * max_chars:
            return True
        return len(unicodedata.normalize("NFC", text)) > max_chars


def byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable ones stand for themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def parts_of(step: Any) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as JSON, and those of a sequence one by one."""
    if step is None:
        return []
    state = json.loads(step.__getstate__())
    lists = (state.get(key) for key in ("normalizers", "pretokenizers", "decoders"))
    return next(filter(None, lists), [state])


def _keeps_all(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind in _SPLITS:
        return part.get("behavior") != "Removed"
    if kind == "Replace":
        return len(part["content"]) >= len(part["pattern"].get("String", part["content"] + "*"))
    return kind in _KEEPS_ALL


def _has_all_bytes(
    core: tokenizers.Tokenizer, vocabulary: dict[str, int], parts: list[dict[str, Any]]
) -> bool:
    """True where unknown characters become byte tokens, and not one token or none."""
    if not isinstance(core.model, models.BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in parts):
        return byte_alphabet().keys() <= vocabulary.keys()
    return core.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
