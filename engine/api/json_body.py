"""Reads a request's JSON body within bounds and turns it into typed structs. Knows no endpoint."""

import asyncio
import re
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request

from engine.errors import InvalidRequestError

MAX_BODY_BYTES = 33_554_432
MAX_DEPTH = 64
BODY_TIMEOUT_S = 60.0

_T = TypeVar("_T")
_FIELD = re.compile(r"^Object (?:contains unknown|missing required) field `(?P<name>.*?)`", re.S)
_PATH = re.compile(r"^(?P<text>.*) - at `\$\.?(?P<path>.*)`$", re.S)


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The whole body; raises HTTPException 408, 413 or 415, and ClientDisconnect."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise HTTPException(415, f"Content-Type {media_type[:80]!r}: send application/json")
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await _collect(request, max_bytes)
    except TimeoutError as error:
        raise HTTPException(408, f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error


async def _collect(request: Request, max_bytes: int) -> bytes:
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
    return b"".join(chunks)


def parse_object(body: bytes) -> dict[str, Any]:
    """The body as a JSON object; raises InvalidRequestError for all else, NaN too."""
    try:
        parsed = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.ValidationError as error:
        raise InvalidRequestError(f"the body must be a JSON object: {error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequestError(f"the body is not valid JSON: {error}") from error
    except RecursionError as error:
        raise _too_deep() from error
    if any(_deeper_than(value, MAX_DEPTH - 1) for value in parsed.values()):
        raise _too_deep()
    return parsed


def member_sizes(body: bytes) -> dict[str, int]:
    """Bytes of each member of the body's object, found without building any; empty if malformed."""
    try:
        members = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return {name: len(memoryview(raw)) for name, raw in members.items()}


def convert(fields: object, kind: type[_T]) -> _T:
    """Typed struct of untyped JSON; raises InvalidRequestError that names the key."""
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        message, param = _explain(str(error), fields)
        raise InvalidRequestError(message, param=param) from error


def _explain(text: str, fields: object) -> tuple[str, str | None]:
    """msgspec's message led by the key that it is about and its value; and that key."""
    at = _PATH.match(text)
    text, path = (at["text"], at["path"]) if at else (text, "")
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


def _too_large(max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the body is larger than {max_bytes} bytes")
