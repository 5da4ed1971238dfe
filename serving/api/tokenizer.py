"""Text to token ids and back, from a Hugging Face model folder."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import tokenizers
from tokenizers import AddedToken, models

from engine.errors import CheckpointError, InvalidRequestError, PromptTooLongError
from engine.model_files import read_bytes, read_object
from serving.api.chat_template import (
    DEFAULT,
    TOOL_USE,
    ChatTemplate,
    compile_templates,
    template_sources,
)
from serving.config import ContentFormat

STANDARD_NAMES: Final = tuple(
    f"{kind}_token" for kind in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
_FLAGS: Final = ("single_word", "lstrip", "rstrip", "normalized", "special")


def add_tokens(
    core: tokenizers.Tokenizer, folder: Path, config: Mapping[str, Any]
) -> dict[str, str]:
    """Completes `core` with what the files of `folder` add; returns the named special tokens.

    `config` is tokenizer_config.json. With an `added_tokens_decoder` it says all; older folders
    have special_tokens_map.json and added_tokens.json instead, as transformers reads them. Raises
    CheckpointError for broken files and for ids that differ between them.
    """
    explicit, extra = _model_specific(config)
    fields = {key: value for key, value in config.items() if key not in explicit}
    if "added_tokens_decoder" in config:
        declared = _decoder_of(config["added_tokens_decoder"])
        known = declared
    else:
        older = read_object(folder / "special_tokens_map.json") or {}
        _merge_map(older, fields, explicit, extra=extra)
        special = {_content(fields[key]) for key in STANDARD_NAMES if fields.get(key)}
        special |= {_content(value) for value in extra}
        declared = _legacy(read_object(folder / "added_tokens.json") or {}, special)
        known = declared | core.get_added_tokens_decoder()
    named = {key: fields[key] for key in STANDARD_NAMES if fields.get(key) is not None}
    named |= {key: value for key, value in fields.items() if _names_token(key, value)}
    named |= explicit
    by_content = {token.content: token for token in known.values()}
    tokens = {key: by_content.get(_content(it)) or _token(it) for key, it in named.items()}
    _extend(core, known, list(tokens.values()), extra=[*map(_token, extra)])
    for index, token in declared.items():
        if (actual := core.token_to_id(token.content)) != index:
            raise CheckpointError(
                f"{folder}: token {token.content!r} has id {index} in one file and {actual} by "
                "tokenizer.json: make added_tokens_decoder (or added_tokens.json) agree with it"
            )
    return {key: token.content for key, token in tokens.items()}


def _extend(
    core: tokenizers.Tokenizer,
    known: Mapping[int, AddedToken],
    named: list[AddedToken],
    *,
    extra: list[AddedToken],
) -> None:
    """Adds what `core` lacks: `known` by their ids, then those with names, then `extra` ones.

    A token that `core` has with other flags is added too, which changes them.
    """
    present = {repr(token) for token in core.get_added_tokens_decoder().values()}
    contents = {token.content for token in core.get_added_tokens_decoder().values()}
    new = [token for _, token in sorted(known.items()) if repr(token) not in present]
    contents |= {token.content for token in new}
    names = {token.content for token in named}
    for token in [*named, *extra]:
        if token.content not in contents:
            contents.add(token.content)
            new.append(token)
    for token in new:
        # A token with a name is special, whatever its entry says.
        token.special = token.special or token.content in names
    core.add_tokens(new)


def _model_specific(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Tokens with names of their own, such as `image_token`, and extra ones without."""
    explicit = {
        key: value
        for key, value in config.items()
        if _names_token(key, value) and isinstance(value, str)
    }
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        return explicit | extra, []
    return explicit, _listed(extra, "extra_special_tokens")


def _merge_map(
    content: Mapping[str, Any],
    fields: dict[str, Any],
    explicit: dict[str, Any],
    *,
    extra: list[Any],
) -> None:
    """special_tokens_map.json over tokenizer_config.json."""
    for key, value in content.items():
        if key == "extra_special_tokens" and isinstance(value, dict):
            explicit |= value
        elif key == "extra_special_tokens":
            extra += [it for it in _listed(value, key) if it not in extra]
        elif key == "additional_special_tokens":
            extra += [] if extra else _listed(value, key)
        else:
            fields[key] = value


def _decoder_of(entry: object) -> dict[int, AddedToken]:
    if not isinstance(entry, dict):
        raise CheckpointError("tokenizer_config.json: 'added_tokens_decoder' is no object")
    found = {}
    for key, value in entry.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise CheckpointError(f"tokenizer_config.json: token id {key[:40]!r} is no number")
        found[int(key)] = _token(value, special=False)
    return found


def _legacy(content: Mapping[str, Any], special: set[str]) -> dict[int, AddedToken]:
    """added_tokens.json: text to id; what no other file calls special is not."""
    found = {}
    for text, index in content.items():
        if not isinstance(index, int) or isinstance(index, bool) or index < 0:
            raise CheckpointError(f"added_tokens.json: the id of {text[:40]!r} is {index!r}")
        is_special = text in special
        found[index] = AddedToken(text, normalized=not is_special, special=is_special)
    return found


def _names_token(key: str, value: object) -> bool:
    is_token = isinstance(value, str) or (isinstance(value, dict) and "content" in value)
    return key.endswith("_token") and key not in STANDARD_NAMES and is_token


def _listed(value: object, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise CheckpointError(f"{key} of the tokenizer is a {type(value).__name__}, no list")
    return list(value)


def _content(value: object) -> str:
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str):
        raise CheckpointError(f"the tokenizer's files have {str(value)[:80]!r} for a token's text")
    return text


def _token(value: object, *, special: bool = True) -> AddedToken:
    """A token from its text, or from an object that has its text and flags."""
    flags: dict[str, Any] = {"special": special}
    if isinstance(value, dict):
        flags |= {name: value[name] for name in _FLAGS if name in value}
    if wrong := [name for name in flags if not isinstance(flags[name], bool)]:
        raise CheckpointError(f"token {_content(value)[:40]!r}: {wrong[0]!r} is no true or false")
    return AddedToken(_content(value), **flags)


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
LONG_IDS = 1024  # decoded without Python's global lock, which costs some time to give back

# A composed character has at most four code points: omega with breathing, accent and iota.
MAX_COMPOSED = 4

PIECE_CHARS = 262_144  # tokenized at once of a text that may not fit
ORDINARY_CHARS = 4  # per token of a context: longer texts are looked at in pieces first

_KEEPS_ALL = ("NFC", "NFD", "NFKD", "Lowercase", "Prepend", "ByteLevel", "Metaspace", "Digits")


class TextLimit(NamedTuple):
    """How long a text may be: in characters, and in tokens if it `must_fit` a context of them."""

    context: int
    max_chars: int
    must_fit: bool


class SingleToken(NamedTuple):
    """A token that stands for its text wherever that occurs; a special one is no text to show."""

    token_id: int
    is_special: bool


class Tokenizer:
    """Text side of a model; this one is for a folder without tokenizer.json, token ids only.

    Methods may be called from any thread. Long work leaves Python's global lock alone, so that
    other threads go on.
    """

    chars_per_token: int | None = 0
    """The most characters that one token stands for; None: any number of them."""

    chat_template: str | None = None
    """Source of the model's chat template."""

    tool_template: str | None = None
    """Source of the chat template for requests that offer tools; often the same."""

    eos_token_id: int | None = None
    """The token that the tokenizer's files call the end of a text."""

    config: Mapping[str, Any] = MappingProxyType({})
    """tokenizer_config.json."""

    special_tokens: Mapping[str, str] = MappingProxyType({})
    """Texts of special tokens by name, such as `eos_token`."""

    template_names: frozenset[str] = frozenset()
    """Variables that the chat template reads."""

    def to_json(self) -> str | None:
        """As a tokenizer.json with all tokens, those of other files too; None: there is none."""
        return None

    def encode(
        self, text: str, *, add_special_tokens: bool, limit: TextLimit | None = None
    ) -> tuple[int, ...]:
        """Token ids of a text; raises InvalidRequestError when the model folder cannot tell.

        Raises PromptTooLongError for a text beyond `limit`, before much of it is tokenized; a text
        that passes may still turn out to have more tokens.
        """
        raise _no_tokenizer("a text prompt")

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        extra: Mapping[str, Any],
        limit: TextLimit | None = None,
    ) -> tuple[int, ...]:
        """Token ids of a conversation; raises InvalidRequestError without a chat template.

        With `continue_final_message` they end with the last message's text.
        """
        raise _no_tokenizer("a chat")

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of token ids, with U+FFFD for bytes that are no character."""
        return ""

    def token_text(self, token_id: int) -> str:
        """One token as text, special tokens included."""
        return f"token_id:{token_id}"

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for, also where they are only part of a character."""
        return self.token_text(token_id).encode()

    def added_token(self, text: str) -> SingleToken | None:
        """The added token of exactly this text; None where there is none."""
        return None

    def in_grammar(self, text: str) -> str:
        """A text as Lark grammars name it: the added token of exactly this text, or its letters.

        To llguidance such a token is no text: a grammar that spells it is one that no model was
        trained to follow, and where nothing else may come the token breaks it.
        """
        token = self.added_token(text)
        return json.dumps(text) if token is None else f"<[{token.token_id}]>"

    def require_text(self, what: str) -> None:
        """Raise InvalidRequestError when `what` needs text and there is none."""
        raise _no_tokenizer(what)


class TextTokenizer(Tokenizer):
    """A tokenizer.json, chat templates by name, and `named` special tokens, which `core` has."""

    def __init__(
        self,
        core: tokenizers.Tokenizer,
        templates: Mapping[str, ChatTemplate] = MappingProxyType({}),
        named: Mapping[str, str] = MappingProxyType({}),
        *,
        config: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        core.no_truncation()
        core.no_padding()
        self._core = core
        self.special_tokens = named
        self.config = config
        self._template = templates.get(DEFAULT)
        self._with_tools = templates.get(TOOL_USE, self._template)
        self.chat_template = None if self._template is None else self._template.source
        self.tool_template = None if self._with_tools is None else self._with_tools.source
        read = (it.names for it in (self._template, self._with_tools) if it is not None)
        self.template_names = frozenset().union(*read)
        if "eos_token" in named:
            self.eos_token_id = core.token_to_id(named["eos_token"])
        self._added = {key: it.content for key, it in core.get_added_tokens_decoder().items()}
        is_byte_level = any(part["type"] == "ByteLevel" for part in _parts_of(core.decoder))
        self._byte_of = _byte_alphabet() if is_byte_level else {}
        parts = [*_parts_of(core.normalizer), *_parts_of(core.pre_tokenizer)]
        self._composes = any(part["type"] == "NFC" for part in parts)
        self.chars_per_token = _chars_per_token(core, parts)

    def to_json(self) -> str | None:
        return str(self._core.to_str())

    def encode(
        self, text: str, *, add_special_tokens: bool, limit: TextLimit | None = None
    ) -> tuple[int, ...]:
        if limit is not None:
            self._check_length(text, limit)
        return tuple(self._encoded(text, add_special_tokens=add_special_tokens).ids)

    def _encoded(self, text: str, *, add_special_tokens: bool) -> tokenizers.Encoding:
        # A batch of one lets go of Python's global lock; `encode` holds it all the while.
        return self._core.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]

    def _check_length(self, text: str, limit: TextLimit) -> None:
        """Raise PromptTooLongError for a text that is known to be too long."""
        most = limit.max_chars
        if limit.must_fit and self.chars_per_token is not None:
            # vLLM's rule: no text is tokenized that cannot fit, however well it would be cut.
            # Accents may be composed first. How many are is not looked up: Python takes the square
            # of a run of them to tell, and keeps all other threads waiting.
            is_composed = self._composes and not text.isascii()
            per_token = self.chars_per_token * (MAX_COMPOSED if is_composed else 1)
            most = min(most, limit.context * per_token)
        if len(text) > most:
            raise _too_long(limit, len(text), f"at most {most} are taken")
        if limit.must_fit and len(text) > max(PIECE_CHARS, ORDINARY_CHARS * limit.context):
            self._check_pieces(text, limit)

    def _check_pieces(self, text: str, limit: TextLimit) -> None:
        """Raise PromptTooLongError as soon as the first pieces of a text have far too many tokens.

        A cut may add tokens at its border, so only twice the context is too many for certain.
        """
        count = 0
        for at in range(0, len(text), PIECE_CHARS):
            piece = text[at : at + PIECE_CHARS]
            count += len(self._encoded(piece, add_special_tokens=False))
            if count > 2 * limit.context:
                told = f"the first {at + len(piece)} of them are {count} tokens"
                raise _too_long(limit, len(text), told)

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        continue_final_message: bool = False,
        extra: Mapping[str, Any],
        limit: TextLimit | None = None,
    ) -> tuple[int, ...]:
        template = self._with_tools if extra.get("tools") else self._template
        if template is None:
            raise InvalidRequestError(
                "this model has no chat template: use /v1/completions, or start the server with "
                "--chat-template",
                param="messages",
            )
        if continue_final_message:
            text = template.render_up_to_last_content(messages, extra=extra)
        else:
            text = template.render(
                messages, add_generation_prompt=add_generation_prompt, extra=extra
            )
        return self.encode(text, add_special_tokens=False, limit=limit)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        if len(token_ids) < LONG_IDS:
            return str(self._core.decode(token_ids, skip_special_tokens=skip_special_tokens))
        batch = [list(token_ids)]
        return str(self._core.decode_batch(batch, skip_special_tokens=skip_special_tokens)[0])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        token = self._core.id_to_token(token_id)
        # Added tokens stand for their text; byte-level ones spell bytes as letters; byte fallback
        # writes <0xNN>; SentencePiece writes a space as U+2581.
        if token is None or token_id in self._added:
            return self._added.get(token_id, "").encode()
        if self._byte_of and all(char in self._byte_of for char in token):
            return bytes(self._byte_of[char] for char in token)
        if byte := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(byte[1], 16)])
        return token.replace("\u2581", " ").encode()

    def added_token(self, text: str) -> SingleToken | None:
        found = self._core.get_added_tokens_decoder().items()
        return next((SingleToken(key, it.special) for key, it in found if it.content == text), None)

    def require_text(self, what: str) -> None:
        pass


def load_tokenizer(
    folder: Path, chat_template: str | None = None, content_format: ContentFormat = "auto"
) -> Tokenizer:
    """Tokenizer of a model folder; one without tokenizer.json still serves token ids.

    The tokens and templates of its other files are read as well; `chat_template`, a template's
    text, replaces all of theirs. Raises CheckpointError when one of them is broken.
    """
    path = folder / "tokenizer.json"
    content = read_bytes(path)
    if content is None:
        return Tokenizer()
    read_object(path)  # for the clear error if it is not a JSON object
    try:
        core = tokenizers.Tokenizer.from_buffer(content)
    except Exception as error:  # the Rust library has no other class
        raise CheckpointError(f"{path.name} is no tokenizer: {error}") from error
    config = read_object(folder / "tokenizer_config.json") or {}
    named = add_tokens(core, folder, config)
    given = None if chat_template is None else {DEFAULT: chat_template}
    sources = given or template_sources(folder, config)
    return TextTokenizer(
        core, compile_templates(sources, named, content_format), named, config=config
    )


def _too_long(limit: TextLimit, num_chars: int, told: str) -> PromptTooLongError:
    return PromptTooLongError(
        f"This model's maximum context length is {limit.context} tokens. However, your prompt has "
        f"{num_chars} characters: {told}. Please reduce its length.",
        param="prompt",
        code="context_length_exceeded",
    )


def _no_tokenizer(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{what} needs a tokenizer and this model folder has no tokenizer.json: send token ids",
        code="no_tokenizer",
    )


def _chars_per_token(core: tokenizers.Tokenizer, parts: Sequence[dict[str, Any]]) -> int | None:
    """Characters of the longest token; None where a token may stand for any number of them.

    A text with more characters than a context of such tokens holds is refused before it is
    tokenized, which is only sound for tokenizers whose `parts` drop no characters.
    """
    added = core.get_added_tokens_decoder().values()
    vocabulary = core.get_vocab()
    sound = (
        all(map(_keeps_all, parts))
        and not any(token.lstrip or token.rstrip for token in added)
        and _has_all_bytes(core, vocabulary, parts)
    )
    return max(map(len, vocabulary)) if sound else None


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's stand-ins for bytes: printable ones stand for themselves, others follow U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    stand_ins = {chr(byte): byte for byte in printable}
    return stand_ins | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def _parts_of(step: Any) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as JSON, and those of a sequence one by one."""
    if step is None:
        return []
    # The bindings show the parts of a sequence in no other way than as pickled JSON.
    state = json.loads(step.__getstate__())
    lists = (state.get(key) for key in ("normalizers", "pretokenizers", "decoders"))
    return next(filter(None, lists), [state])


def _keeps_all(part: dict[str, Any]) -> bool:
    kind = part["type"]
    if kind in ("Split", "Punctuation"):
        return part.get("behavior") != "Removed"
    if kind == "Replace":
        # What a regular expression matches may have any length, a string only its own.
        pattern = part["pattern"].get("String")
        return pattern is not None and len(part["content"]) >= len(pattern)
    return kind in _KEEPS_ALL


def _has_all_bytes(
    core: tokenizers.Tokenizer, vocabulary: dict[str, int], parts: Sequence[dict[str, Any]]
) -> bool:
    """True where unknown characters become byte tokens, and not one token or none."""
    if not isinstance(core.model, models.BPE):
        return False
    if any(part["type"] == "ByteLevel" for part in parts):
        return _byte_alphabet().keys() <= vocabulary.keys()
    return core.model.byte_fallback and all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
