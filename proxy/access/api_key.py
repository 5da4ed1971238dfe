"""API keys as a file names them: who may ask, how much, and what is done to its requests. Pure."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Final

import msgspec
import yaml
from msgspec import Meta, structs

from engine.errors import ConfigError

MIN_KEY_CHARS: Final = 16
MAX_KEYS: Final = 10_000
MAX_DEPTH: Final = 16

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._@-]{1,64}\Z")]
Limit = Annotated[int, Meta(ge=1, le=10**12)]


class ApiKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One key: its text, or the SHA-256 of it in hex, and the policy for its holder.

    `tenant`, by default the key's own name, has one share of the queue, of `weight`; a lower
    `priority` goes first. `isolate_cache`: requests of this tenant find nothing in the cache that
    others sent, and others nothing of theirs. `client_priority`: its requests may carry a
    `priority` for the nodes' queues. `operator`: may see the status of the whole cluster.
    """

    name: Name
    key: Annotated[str, Meta(min_length=MIN_KEY_CHARS, max_length=1024)] | None = None
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")] | None = None
    tenant: Name | None = None
    requests_per_minute: Limit | None = None
    tokens_per_minute: Limit | None = None
    max_concurrent_requests: Limit | None = None
    weight: Annotated[float, Meta(ge=0.01, le=100.0)] = 1.0
    priority: Annotated[int, Meta(ge=-100, le=100)] = 0
    isolate_cache: bool = False
    hide_cached_tokens: bool = False
    client_priority: bool = False
    operator: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError, which decoding reports."""
        if (self.key is None) == (self.sha256 is None):
            raise ValueError(f"{self.name} needs either key or sha256")
        if self.key is not None and not (self.key.isprintable() and self.key == self.key.strip()):
            raise ValueError(f"the key of {self.name} has characters that no header carries")

    @property
    def owner(self) -> str:
        return self.tenant or self.name

    def hashed(self) -> "ApiKey":
        """The same without the text of the key, which nobody needs any more."""
        if self.key is None:
            return self
        return structs.replace(self, key=None, sha256=hashlib.sha256(self.key.encode()).hexdigest())


class _KeyList(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    keys: Annotated[tuple[ApiKey, ...], Meta(max_length=MAX_KEYS)]


def parse_keys(data: bytes, source: str) -> tuple[ApiKey, ...]:
    """The keys of a file in YAML or JSON. ConfigError names the place, and never a key's text."""
    _check_depth(data, source)
    try:
        # Texts only, which the types below read: nothing is a date by its looks.
        content = yaml.load(data, Loader=yaml.CBaseLoader)
        keys = msgspec.convert(content, _KeyList, strict=False).keys
    except msgspec.ValidationError as error:
        # A missing quote or colon makes a field's name of a secret.
        told = re.sub(r"unknown field `(?![a-z_]{1,40}`)[^`]*`", "an unknown field", str(error))
        raise ConfigError(f"{source}: {told}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        # The parser's own message quotes the line, and with it a secret.
        line = re.search(r"line \d+", str(error))
        where = f" at {line[0]}" if line else ""
        raise ConfigError(f"{source} is no YAML or JSON{where}") from None
    keys = tuple(key.hashed() for key in keys)
    for field, what in (("name", "name"), ("sha256", "key")):
        first: dict[str, ApiKey] = {}
        for key in keys:
            other = first.setdefault(getattr(key, field), key)
            if other is not key:
                raise ConfigError(f"{source}: {what} of {key.name!r} is that of {other.name!r} too")
    return keys


def _check_depth(data: bytes, source: str) -> None:
    """Raises ConfigError before the parser recurses so deep that the process dies of it."""
    depth = 0
    # What is no YAML is said better where it is decoded.
    with suppress(yaml.YAMLError):
        for event in yaml.parse(data, Loader=yaml.CBaseLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            if depth > MAX_DEPTH:
                raise ConfigError(f"{source} is nested deeper than {MAX_DEPTH} levels")


class KeyTable:
    """Finds keys by their text, in a time that says nothing about other keys.

    Digests under a random key of this process are compared, so nobody can steer what is looked up.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._secret = secrets.token_bytes(32)
        self._names = {self._digest(bytes.fromhex(it.sha256 or "")): it.name for it in keys}

    def find(self, text: bytes) -> str | None:
        """The name of the key with this text."""
        return self._names.get(self._digest(hashlib.sha256(text).digest()))

    def _digest(self, sha256: bytes) -> bytes:
        return hmac.digest(self._secret, sha256, "sha256")
