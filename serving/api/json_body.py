"""Hostile JSON to typed structs, within bounds: bodies and `kv_transfer_params`.

One call into the decoder keeps all other threads waiting, so none may build millions of objects: of
a large body the sizes of its members are checked before anything is built.
"""

import re
from collections.abc import Iterable, Mapping
from functools import cache, reduce
from itertools import islice
from operator import or_
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, Union, get_args, get_origin

import msgspec
import structlog
from msgspec import Raw

from engine.errors import InvalidRequestError, KVTransferParamsError, PromptTooLongError
from engine.struct_types import learned
from engine.types import MAX_KV_TRANSFER_PARAMS_BYTES, KVTransferParams

MAX_WARNINGS: Final = 256
MAX_KEY_CHARS: Final = 80

log = structlog.get_logger()


@cache
def lenient(kind: Any) -> Any:
    """`kind` with every struct in it, however deep, replaced by a subclass that skips unknown keys.

    The decoder steps over the values of such keys and builds nothing of them.
    """
    if get_origin(kind) in (Union, UnionType):
        return reduce(or_, map(lenient, get_args(kind)))
    if get_origin(kind) is Annotated:
        inner, *bounds = get_args(kind)
        return Annotated[lenient(inner), *bounds]
    if get_origin(kind) is list:
        return list[lenient(get_args(kind)[0])]  # type: ignore[misc]
    is_struct = isinstance(kind, type) and issubclass(kind, msgspec.Struct)
    return _lenient_struct(kind) if is_struct else kind


def _lenient_struct(kind: type[msgspec.Struct]) -> type[msgspec.Struct]:
    changed: list[Any] = []
    for field in msgspec.structs.fields(kind):
        if (type_ := lenient(field.type)) is not field.type:
            default: Any = msgspec.field(default=field.default)
            if field.default_factory is not msgspec.NODEFAULT:
                default = msgspec.field(default_factory=field.default_factory)
            changed.append((field.name, type_, default))
    return msgspec.defstruct(
        kind.__name__,
        changed,
        bases=(kind,),
        forbid_unknown_fields=False,
        namespace={"__doc__": kind.__doc__},
        frozen=True,
        kw_only=True,
        tag=kind.__struct_config__.tag,
    )


class UnknownKeyWarnings:
    """Logs each key once, and no more than `MAX_WARNINGS` of them: clients choose the names."""

    def __init__(self) -> None:
        self._known: set[str] = set()

    def warn(self, keys: Iterable[str]) -> None:
        """Log the keys that have not been logged yet; called from several threads."""
        for key in keys:
            # Escaped: a name may hold what terminals obey.
            shown = key[:MAX_KEY_CHARS].encode("unicode_escape").decode()
            if shown in self._known or len(self._known) >= MAX_WARNINGS:
                continue
            self._known.add(shown)
            log.warning("an unknown key of a request is ignored", key=shown)


warnings: Final = UnknownKeyWarnings()
"""Of the process: however many apps serve, one line per key."""


MAX_ITEMS = 1_048_576
MAX_TEMPLATE_BYTES = 1_048_576  # of each member that only chat templates read
MAX_OTHER_BYTES = 262_144
MAX_COLONS = 4096
MAX_OBJECTS = 131_072  # in all messages of a request: turns, parts, calls, their arguments
FLAGS_OF_TRANSFERS: Final = ("do_remote_decode", "do_remote_prefill")
"""Proxies send null in them where they mean false."""

_T = TypeVar("_T")
_Body = TypeVar("_Body", bound=msgspec.Struct)
_FIELD = re.compile(
    r"^Object (?P<what>contains unknown|missing required) field `(?P<name>.*?)`", re.S
)
# No string holds a bare quote, so only one that ends with a brace looks like an object, and no
# spelling of a key hides one.
_OBJECT = re.compile(rb'\{[ \t\r\n]*"')
_PATH = re.compile(r"^(?P<text>.*) - at `\$(?P<path>.*)`$", re.S)


class _LargeMembers(msgspec.Struct, frozen=True):
    """The members that may be large, found without building any; the decoder skips all others."""

    prompt: Raw = Raw()
    messages: Raw = Raw()
    input: Raw = Raw()
    instructions: Raw = Raw()
    system: Raw = Raw()
    tokens: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    tools: Raw = Raw()
    kv_transfer_params: Raw = Raw()


def decode_body(
    body: bytes, kind: type[_Body], max_model_len: int, *, strict: bool = True
) -> _Body:
    """Decode a request's body; raises InvalidRequestError that names the wrong key and its value.

    Unknown keys are wrong if `strict`, else they are ignored with a warning. Raises
    PromptTooLongError before a list of more than `max_model_len` token ids is built.
    """
    if len(body) > MAX_OTHER_BYTES:
        _check_sizes(body, max_model_len)
    try:
        try:
            return _decode(body, kind)
        except msgspec.ValidationError as error:
            field = _FIELD.match(str(error))
            if strict or field is None or field["what"] != "contains unknown":
                raise
        # Nearly all bodies have no unknown keys: they are decoded once and by the strict type.
        values: _Body = _decode(body, lenient(kind))
        known = {it.encode_name for it in msgspec.structs.fields(kind)}
        on_top = decode_json(body, dict[str, Raw]).keys() - known
        warnings.warn(sorted({field["name"], *on_top}))
        return values
    except msgspec.ValidationError as error:
        raise _explained(error, decode_json(body, dict[str, Raw])) from error


def decode_json(text: bytes | Raw, kind: type[_T]) -> _T:
    """Decode JSON; raises InvalidRequestError for anything else, NaN and infinite numbers too."""
    try:
        return _decode(text, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the body must be a JSON object: {error}") from error


def convert(values: object, kind: type[_T]) -> _T:
    """Typed struct of plain values; raises InvalidRequestError that names the key."""
    try:
        return msgspec.convert(values, learned(kind))
    except msgspec.ValidationError as error:
        raise _explained(error, values if isinstance(values, dict) else {}) from error


def decode_kv_transfer_params(raw: Raw) -> KVTransferParams | None:
    """Typed parameters, or None when they ask for nothing (absent, null, {}, flags false).

    Raises KVTransferParamsError for wrong types and unknown keys; what they mean, and whether they
    can be believed, is for the connector to say.
    """
    text = bytes(memoryview(raw))
    if len(text) > MAX_KV_TRANSFER_PARAMS_BYTES:
        raise KVTransferParamsError(
            f"kv_transfer_params: {len(text)} bytes, {MAX_KV_TRANSFER_PARAMS_BYTES} are allowed"
        )
    # Before millions of ids or keys become objects.
    if text.count(b",") > MAX_ITEMS or text.count(b":") > MAX_COLONS:
        raise KVTransferParamsError(
            f"kv_transfer_params: more than {MAX_ITEMS} ids or too many keys"
        )
    # Plain values first: the flags may be null, which their type does not allow.
    value = decode_json(text or b"null", object)
    if value is None:
        return None
    if isinstance(value, dict):
        nulls = {key for key in FLAGS_OF_TRANSFERS if value.get(key, False) is None}
        value = {key: it for key, it in value.items() if key not in nulls}
    try:
        params = convert(value, KVTransferParams)
    except InvalidRequestError as error:
        raise KVTransferParamsError(f"kv_transfer_params: {error}") from error
    return None if params == KVTransferParams() else params


def _decode(text: bytes | Raw, kind: type[_T]) -> _T:
    """Raises ValidationError for wrong types only; nesting is bounded by Python's own limit."""
    try:
        return msgspec.json.decode(text, type=learned(kind))
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise InvalidRequestError("the body is nested deeper than any request needs") from error


def _check_sizes(body: bytes, max_model_len: int) -> None:
    # Raw members are slices of the body: this decoding builds nothing that grows with it.
    members = msgspec.structs.asdict(decode_json(body, _LargeMembers))
    large = {name: bytes(memoryview(raw)) for name, raw in members.items()}
    others = len(body) - sum(map(len, large.values()))
    if others > MAX_OTHER_BYTES:
        raise InvalidRequestError(
            f"the keys beside the prompt take {others} bytes: send at most {MAX_OTHER_BYTES}"
        )
    for name in ("prompt", "tokens"):
        _check_num_items(large[name], name, max_model_len)
    for name in ("messages", "input", "system"):
        if next(islice(_OBJECT.finditer(large[name]), MAX_OBJECTS, None), None) is not None:
            raise InvalidRequestError(
                f"{name}: more than {MAX_OBJECTS} objects (turns, parts, calls, arguments): send "
                "fewer",
                param=name,
            )
    for name in ("chat_template_kwargs", "tools"):
        if (size := len(large[name])) > MAX_TEMPLATE_BYTES:
            raise InvalidRequestError(
                f"{name} take {size} bytes: send at most {MAX_TEMPLATE_BYTES}", param=name
            )


def _check_num_items(text: bytes, name: str, max_model_len: int) -> None:
    """Refuse a list with too many commas: there is one between any two items.

    Only a list that begins with a text or a list holds several prompts.
    """
    if not text.startswith(b"["):
        return
    is_one_prompt = text[1:].lstrip()[:1] not in (b"[", b'"')
    most = min(MAX_ITEMS, max_model_len) if is_one_prompt else MAX_ITEMS
    if text.count(b",") >= most:
        raise PromptTooLongError(
            f"This model's maximum context length is {max_model_len} tokens. However, {name} is a "
            f"list with {most} commas or more, which is not taken: send less at once.",
            param=name,
            code="context_length_exceeded",
        )


def _explained(error: msgspec.ValidationError, values: Mapping[str, Any]) -> InvalidRequestError:
    """msgspec's message, led by the key that it is about and that key's value."""
    text, path = str(error), ""
    if at := _PATH.match(text):
        text, path = at["text"], at["path"].lstrip(".")
    if field := _FIELD.match(text):
        path = f"{path}.{field['name'][:80]}".lstrip(".")
        text = "unknown parameter" if "unknown" in text[:24] else "required parameter is missing"
    if ".content[" in path and text.startswith("Invalid enum value"):
        text += ": this model reads text only"
    if not path:
        return InvalidRequestError(text)
    # Shown to the client: scalars only, and never a whole prompt.
    value = values.get(path)
    if isinstance(value, Raw):
        is_scalar = bytes(memoryview(value)[:1]) not in (b"[", b"{")
        value = decode_json(value, object) if is_scalar else None
    shown = f"={repr(value)[:80]}" if isinstance(value, str | int | float) else ""
    return InvalidRequestError(f"{path}{shown}: {text}", param=path)
