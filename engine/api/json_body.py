"""Turns a request's JSON body into plain values and typed structs, within bounds.

One call into the decoder keeps all other threads waiting, so none builds millions of objects: each
member is decoded by itself, the large ones as what they must be. Knows no endpoint.
"""

import re
from collections.abc import Callable
from typing import Any, Final, TypeVar

import msgspec
from msgspec import Raw

from engine.api.schema import MAX_MESSAGES, Messages, Prompt
from engine.errors import InvalidRequestError, PromptTooLongError

MAX_DEPTH = 64
MAX_ITEMS = 1_048_576
MAX_TEMPLATE_KWARGS_BYTES = 1_048_576
MAX_OTHER_BYTES = 262_144

_T = TypeVar("_T")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<name>.*?)`", re.S)
_PATH = re.compile(r"^(?P<text>.*) - at `\$(?P<path>.*)`$", re.S)


class _LargeMembers(msgspec.Struct, frozen=True):
    """The members that may be large, found without building any; all others are skipped."""

    prompt: Raw = Raw()
    messages: Raw = Raw()
    tokens: Raw = Raw()
    chat_template_kwargs: Raw = Raw()
    kv_transfer_params: Raw = Raw()


def parse_object(body: bytes, max_model_len: int) -> dict[str, Any]:
    """The body as a JSON object; raises InvalidRequestError for all else, NaN too.

    No list of ids is built that is longer than `max_model_len`. `kv_transfer_params` stay
    undecoded: `engine.api.kv_params` reads them, or nobody does.
    """
    if len(body) > MAX_OTHER_BYTES:
        _check_sizes(body, max_model_len)
    members = _decode_body(body, dict[str, Raw])
    return {name: _reader(name)(raw) for name, raw in members.items()}


def decode_any(raw: Raw) -> Any:
    """Any JSON; raises InvalidRequestError when it is nested too deep."""
    value = _decode_body(raw, object)
    if _deeper_than(value, MAX_DEPTH - 1):
        raise _too_deep()
    return value


def _check_sizes(body: bytes, max_model_len: int) -> None:
    large = msgspec.structs.asdict(_decode_body(body, _LargeMembers))
    others = len(body) - sum(len(memoryview(raw)) for raw in large.values())
    if others > MAX_OTHER_BYTES:
        raise InvalidRequestError(
            f"the keys beside the prompt take {others} bytes: send at most {MAX_OTHER_BYTES}"
        )
    for name in ("prompt", "tokens"):
        _check_items(bytes(memoryview(large[name])), name, max_model_len)
    # Every message has this key, and no string can hold it with bare quotes.
    num_messages = bytes(memoryview(large["messages"])).count(b'"role"')
    if num_messages > MAX_MESSAGES:
        raise InvalidRequestError(
            f"messages: {num_messages} turns, at most {MAX_MESSAGES} are taken", param="messages"
        )
    kwargs = len(memoryview(large["chat_template_kwargs"]))
    if kwargs > MAX_TEMPLATE_KWARGS_BYTES:
        raise InvalidRequestError(
            f"chat_template_kwargs take {kwargs} bytes: send at most {MAX_TEMPLATE_KWARGS_BYTES}",
            param="chat_template_kwargs",
        )


def _read_prompt(raw: Raw) -> object:
    return _read_typed(raw, Prompt, "prompt")


def _read_messages(raw: Raw) -> object:
    return _read_typed(raw, Messages, "messages")


def _read_tokens(raw: Raw) -> object:
    return _read_typed(raw, list[int], "tokens")


def _keep(raw: Raw) -> object:
    return raw


_READERS: Final[dict[str, Callable[[Raw], object]]] = {
    "prompt": _read_prompt,
    "messages": _read_messages,
    "tokens": _read_tokens,
    "kv_transfer_params": _keep,
}


def _reader(name: str) -> Callable[[Raw], object]:
    return _READERS.get(name, decode_any)


def _check_items(text: bytes, name: str, max_model_len: int) -> None:
    """Items of a list have commas between them, so that there are no more items than commas.

    Only a list that begins with a text or a list holds several prompts.
    """
    if not text.startswith(b"["):
        return
    is_one_prompt = text[1:].lstrip()[:1] not in (b"[", b'"')
    most = min(MAX_ITEMS, max_model_len) if is_one_prompt else MAX_ITEMS
    if text.count(b",") >= most:
        raise PromptTooLongError(
            f"{name}: a list with {most} commas or more is not taken, and this model's maximum "
            f"context length is {max_model_len} tokens: send less at once",
            param=name,
            code="context_length_exceeded",
        )


def _read_typed(raw: Raw, kind: Any, name: str) -> object:
    try:
        return _decode(raw, kind)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), None, name)
        raise InvalidRequestError(message, param=param) from error


def _decode_body(body: bytes | Raw, kind: type[_T]) -> _T:
    try:
        return _decode(body, kind)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the body must be a JSON object: {error}") from error


def _decode(text: bytes | Raw, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.ValidationError:
        raise
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep() from error


def convert(fields: object, kind: type[_T]) -> _T:
    """Typed struct of untyped JSON; raises InvalidRequestError that names the key."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), fields)
        raise InvalidRequestError(message, param=param) from error


def _explain(text: str, fields: object, root: str = "") -> tuple[str, str | None]:
    """msgspec's message led by the key that it is about and its value; and that key."""
    at = _PATH.match(text)
    text, path = (at["text"], at["path"]) if at else (text, "")
    path = f"{root}{path}".lstrip(".")
    field = _FIELD.match(text)
    if field:
        path = f"{path}.{field['name'][:80]}".lstrip(".")
        text = "unknown parameter" if "unknown" in text[:24] else "required parameter is missing"
    if isinstance(fields, dict) and isinstance(fields.get(path), str | int | float):
        return f"{path}={repr(fields[path])[:80]}: {text}", path
    return (f"{path}: {text}", path) if path else (text, None)


def _deeper_than(value: object, depth: int) -> bool:
    if isinstance(value, dict):
        return depth == 0 or any(_deeper_than(item, depth - 1) for item in value.values())
    if isinstance(value, list):
        return depth == 0 or any(
            _deeper_than(item, depth - 1) for item in value if isinstance(item, list | dict)
        )
    return False


def _too_deep() -> InvalidRequestError:
    return InvalidRequestError(f"the body is nested deeper than {MAX_DEPTH} levels")
