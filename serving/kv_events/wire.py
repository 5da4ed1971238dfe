"""KV events on the wire: vLLM's structs, encoded as it does today and decoded in every older form.

An event is a map whose `type` is its class, or (before vLLM 0.24) an array that begins with it; the
batch around it is an array, in one version a map. Hashes are bytes, or integers of 64 bits, signed
for some publishers. Fields were only ever added at the end. Knows no sockets.

Other projects' hashes cannot be computed by anybody else, so their events are read with all that
went into a hash (`EngineStored`); those of Tandem's own nodes name digests that everybody computes.
"""

from collections.abc import Iterable
from types import NoneType
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, field
from msgspec.msgpack import Decoder

from engine.errors import KVEventError

Form = Literal["map", "array"]
BlockHash = Annotated[bytes, Meta(max_length=64)] | int
MAX_PAYLOAD_BYTES = 4 * 2**20
"""Of one batch that is read, twice what is published (`event_log.py`). Its objects take 14 times as
much at most, where its tokens and hashes are short."""
MAX_EVENTS = 2**17
"""Of one batch that is read: an event that nobody knows may be three bytes long."""
SEQUENCE_BYTES = 8
SNAPSHOT = b"snapshot"
"""Asks a replay endpoint for the state; as long as a sequence number, and none has its value."""
END_SEQUENCE = -1
"""The number of an answer's last message, which has no payload."""
GPU, CPU, STORAGE = "GPU", "CPU", "STORAGE"
FULL_ATTENTION, LATENT_ATTENTION = "full_attention", "mla_attention"
SLIDING_WINDOW, MAMBA = "sliding_window", "mamba"
_REMOTE = "REMOTE"
_NIL = b"\xc0"
_MAX_HASH = 2**64 - 1
_MAX_INCARNATION = 256  # characters


# No default on the wire: vLLM's own decoder demands these fields, and msgspec leaves out only what
# equals a plain default. They may be missing in what is decoded, which is older.
def _always_sent() -> Any:
    return field(default_factory=NoneType)


def _unread() -> Any:
    return field(default=msgspec.Raw())


class _Map(msgspec.Struct, frozen=True, gc=False, omit_defaults=True, tag=True):
    """Base of the events of today: a map with the class as `type`."""


class BlockStored(_Map, frozen=True):
    """Blocks of one group became findable. A hash names a whole prefix, the next one's parent.

    `parent_block_hash`: of the prefix before the first of them, None at the start of a prompt.
    `token_ids`: `block_size` for each hash, in order; none at all where a tier does not know them.
    `extra_keys`: for each hash what else went into it, such as `cache_salt` in a prompt's first
    one. `medium`: the tier. A hash that is stored twice is removed twice.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_block_hash: BlockHash | None
    token_ids: tuple[int, ...]
    block_size: int
    lora_id: int | None = _always_sent()
    medium: str | None = _always_sent()
    lora_name: str | None = _always_sent()
    extra_keys: tuple[tuple[Any, ...] | None, ...] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class EngineStored(BlockStored, frozen=True):
    """As an engine of another project announced it; only ever decoded.

    `raw_keys`: its `extra_keys` as they came, which may be anything and are read when they are
    needed. `cache_salt`: SGLang's, of the whole request.
    """

    raw_keys: bytes = b""
    cache_salt: str | None = None

    def keys(self) -> list[bytes]:
        """For each hash what went into it beside tokens, as opaque bytes; empty for nothing.

        A salt alone is `salt_key(salt)` in a prompt's first block, in both projects.
        Raises KVEventError where there are not as many as hashes.
        """
        keys = _split(self.raw_keys, len(self.block_hashes))
        if self.cache_salt and self.parent_block_hash is None and keys[:1] == [b""]:
            keys[0] = salt_key(self.cache_salt)
        if self.lora_id is None and self.lora_name is None:
            return keys
        adapter = _ENCODER.encode((self.lora_id, self.lora_name))
        return [adapter + key for key in keys]


class BlockRemoved(_Map, frozen=True):
    """One copy of each of these blocks is gone."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = _always_sent()
    group_idx: int | None = None


class AllBlocksCleared(_Map, frozen=True):
    """Nothing is findable any more, in no group and tier."""


Event = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(msgspec.Struct, frozen=True):
    """Events of one step. `ts`: seconds since the epoch, on the publisher's clock.

    `incarnation`: one life of the publisher; None for those of other projects. `num_unknown`:
    events of types that this version does not know, left out of `events`; never sent.
    """

    ts: float
    events: tuple[Event, ...]
    data_parallel_rank: int | None = None
    incarnation: str | None = None
    num_unknown: int = 0


def encode(batch: EventBatch, form: Form = "map") -> bytes:
    """One batch as MessagePack. The incarnation follows the fields that vLLM's decoder reads."""
    events: Iterable[Any] = batch.events
    if form == "array":
        events = [(type(e).__name__, *msgspec.structs.astuple(e)) for e in events]
    head = (batch.ts, events, batch.data_parallel_rank)
    return _ENCODER.encode(head if batch.incarnation is None else (*head, batch.incarnation))


def salt_key(cache_salt: str) -> bytes:
    """A request's salt as it stands among the keys of its first block."""
    return _ENCODER.encode((cache_salt,))


def decode(payload: bytes, *, is_foreign: bool = False) -> EventBatch:
    """A batch in any published form. Integer hashes come out unsigned.

    `extra_keys` are left out: who follows Tandem's nodes needs none, and as they may be anything, a
    byte of them may become 64. Stored blocks of foreign engines are `EngineStored`. Events about
    another machine's cache are left out. Raises KVEventError that says what is wrong.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise KVEventError(f"a batch of {len(payload)} bytes exceeds {MAX_PAYLOAD_BYTES}")
    try:
        return _decode(payload, is_foreign=is_foreign)
    # Beside its own errors msgspec lets those of UTF-8 and of deep nesting through.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise KVEventError(f"no batch of KV events: {error}") from error


# --- forms -------------------------------------------------------------------------------------


class _StoredMap(BlockStored, frozen=True, tag="BlockStored"):
    extra_keys: msgspec.Raw = _unread()  # type: ignore[assignment]
    cache_salt: str | None = None
    locality: str | None = None


class _StoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    extra_keys: msgspec.Raw = _unread()  # type: ignore[assignment]


class _RemovedMap(BlockRemoved, frozen=True, tag="BlockRemoved"):
    locality: str | None = None


class _RemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    pass


class _ClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


E = TypeVar("E")
_MapEvent = _StoredMap | _RemovedMap | AllBlocksCleared
_ArrayEvent = _StoredArray | _RemovedArray | _ClearedArray


class _Batch(msgspec.Struct, Generic[E], array_like=True):
    """The array around events. What stands fourth may be another project's, of any type."""

    ts: float
    events: Annotated[tuple[E, ...], Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None
    incarnation: msgspec.Raw = msgspec.Raw()


class _BatchMap(_Batch[E], Generic[E], array_like=False):
    """The same as a map."""


class _TypeOf(msgspec.Struct):
    type: str


class _TypeFirst(msgspec.Struct, array_like=True):
    type: str


_ENCODER = msgspec.msgpack.Encoder()
_OF_MAPS = Decoder(_Batch[_MapEvent])
_OF_ARRAYS = Decoder(_Batch[_ArrayEvent])
_OF_ANY = Decoder(_Batch[msgspec.Raw])
_MAP_OF_ANY = Decoder(_BatchMap[msgspec.Raw])
_MAP: Decoder[_MapEvent] = Decoder(_MapEvent)
_ARRAY: Decoder[_ArrayEvent] = Decoder(_ArrayEvent)
_TYPE_IN_MAP = Decoder(_TypeOf)
_TYPE_IN_ARRAY = Decoder(_TypeFirst)
_INCARNATION = Decoder(Annotated[str, Meta(max_length=_MAX_INCARNATION)])
_RAWS = Decoder(list[msgspec.Raw])
_STORED, _REMOVED = len(BlockStored.__struct_fields__), len(BlockRemoved.__struct_fields__)
_EXTRA_KEYS = BlockStored.__struct_fields__.index("extra_keys")
_NAMES = {kind.__name__ for kind in (BlockStored, BlockRemoved, AllBlocksCleared)}


def _decode(payload: bytes, *, is_foreign: bool) -> EventBatch:
    """Today's form at once; the others event by event, which also leaves out unknown types."""
    for decoder in (_OF_MAPS, _OF_ARRAYS):
        try:
            batch = decoder.decode(payload)
        except msgspec.ValidationError:
            continue
        return _plain(batch, batch.events, is_foreign=is_foreign)
    mixed = (_OF_ANY if _is_array(payload) else _MAP_OF_ANY).decode(payload)
    events = [event for raw in mixed.events if (event := _event(bytes(raw))) is not None]
    num_unknown = len(mixed.events) - len(events)
    return _plain(mixed, events, num_unknown=num_unknown, is_foreign=is_foreign)


def _plain(
    batch: _Batch[Any], events: Iterable[Event], *, is_foreign: bool, num_unknown: int = 0
) -> EventBatch:
    incarnation = _incarnation(bytes(batch.incarnation))
    plain = tuple(_plain_event(e, is_foreign) for e in events if not _is_remote(e))
    return EventBatch(batch.ts, plain, batch.data_parallel_rank, incarnation, num_unknown)


def _incarnation(raw: bytes) -> str | None:
    try:
        return _INCARNATION.decode(raw) if raw else None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _event(raw: bytes) -> Event | None:
    """One event in either form; None for a type that this version does not know."""
    is_array = _is_array(raw)
    try:
        return (_ARRAY if is_array else _MAP).decode(raw)
    except msgspec.ValidationError:
        kind = _TYPE_IN_ARRAY.decode(raw).type if is_array else _TYPE_IN_MAP.decode(raw).type
        if kind in _NAMES:
            raise
        return None


def _is_array(raw: bytes) -> bool:
    """MessagePack's arrays begin with 0x9. up to 15 entries, with 0xDC or 0xDD beyond."""
    return raw[0] >> 4 == 0x9 or raw[0] in (0xDC, 0xDD)


def _is_remote(event: Event) -> bool:
    return isinstance(event, _StoredMap | _RemovedMap) and event.locality == _REMOTE


def _plain_event(event: Event, is_foreign: bool) -> Event:
    """One class for each type, whatever its form was, and one integer for each integer hash."""
    if isinstance(event, BlockStored):
        values = list(msgspec.structs.astuple(event)[:_STORED])
        raw_keys, values[_EXTRA_KEYS] = bytes(values[_EXTRA_KEYS]), None
        salt = event.cache_salt if isinstance(event, _StoredMap) else None
        event = BlockStored(*values)
        if is_foreign:
            known = msgspec.structs.asdict(event) | {"raw_keys": raw_keys, "cache_salt": salt}
            event = EngineStored(**known)
    elif isinstance(event, BlockRemoved):
        event = BlockRemoved(*msgspec.structs.astuple(event)[:_REMOVED])
    else:
        return AllBlocksCleared()
    if not event.block_hashes or isinstance(event.block_hashes[0], bytes):
        return event
    hashes = tuple(map(_unsigned, event.block_hashes))
    if isinstance(event, BlockRemoved):
        return msgspec.structs.replace(event, block_hashes=hashes)
    parent = None if event.parent_block_hash is None else _unsigned(event.parent_block_hash)
    return msgspec.structs.replace(event, block_hashes=hashes, parent_block_hash=parent)


def _unsigned(block_hash: BlockHash) -> BlockHash:
    return block_hash & _MAX_HASH if isinstance(block_hash, int) else block_hash


def _split(raw: bytes, count: int) -> list[bytes]:
    """The elements of an array of `count`, which nobody has to read."""
    if raw in (b"", _NIL):
        return [b""] * count
    # Its length is looked at first: each element becomes an object.
    if not _is_array(raw) or _length(raw) != count:
        raise KVEventError(f"`extra_keys` is no array of {count}")
    return [b"" if key == _NIL else key for key in map(bytes, _RAWS.decode(raw))]


def _length(array: bytes) -> int:
    first = array[0]
    if first >> 4 == 0x9:
        return first & 0xF
    return int.from_bytes(array[1 : 3 if first == 0xDC else 5], "big")
