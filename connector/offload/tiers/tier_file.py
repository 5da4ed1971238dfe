"""The file format of the disk tier: a header that says what each byte is, then the items.

    0        8        12       16       24                     4096 x n
    | magic  | version| length | xxh3   | header, MessagePack | data: item after item |

`length` and `xxh3` are those of the header; each item has its own digest in it. All numbers are
little-endian. Any damage is a `TierFileError` that names its cause.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Final

import msgspec
import xxhash

from connector.offload.items import Item
from connector.offload.messages import FileItems, FileRange
from engine.struct_types import learned

MAGIC: Final = b"TANDEMKV"
VERSION: Final = 2
PREAMBLE: Final = struct.Struct("<8sIIQ")
PAGE: Final = 4096
MAX_HEADER: Final = 64 << 20
Read = Callable[[int, memoryview], int]
"""Fills memory from a byte offset of a file on; returns the bytes read."""


class TierFileError(Exception):
    """A file that cannot be used. `cause`: vanished, short, corrupt, foreign, version or io."""

    def __init__(self, cause: str, detail: str) -> None:
        super().__init__(f"{cause}: {detail}")
        self.cause = cause


class Header(msgspec.Struct, frozen=True):
    """What a file says of itself. `geometry`: see `ChunkPlan.geometry`.

    `offsets[i]`, `digests[i]`: of `items[i]`, bytes from the start of the data, and xxh3-64.
    """

    geometry: str
    items: tuple[Item, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    digests: tuple[int, ...]


def encode(header: Header) -> bytes:
    """The bytes before the data, whole pages."""
    body = msgspec.msgpack.encode(header)
    start = PREAMBLE.pack(MAGIC, VERSION, len(body), xxhash.xxh3_64_intdigest(body))
    return start + body + bytes(-(len(start) + len(body)) % PAGE)


def read_items(name: str, nbytes: int, geometry: str, *, read: Read) -> FileItems:
    """The items of a file of `nbytes` bytes. Raises TierFileError, or OSError from `read`."""
    first = memoryview(bytearray(min(nbytes, 16 * PAGE)))
    if read(0, first) < PREAMBLE.size:
        raise TierFileError("short", f"{nbytes} bytes")
    magic, version, length, digest = PREAMBLE.unpack_from(first)
    if magic != MAGIC:
        raise TierFileError("foreign", f"begins with {magic!r}")
    if version != VERSION:
        raise TierFileError("version", f"format {version}, not {VERSION}")
    if length > min(MAX_HEADER, nbytes - PREAMBLE.size):
        raise TierFileError("short", f"{nbytes} bytes with a header of {length}")
    whole = memoryview(bytearray(PREAMBLE.size + length))
    body = first[: len(whole)]
    if len(body) < len(whole):
        if read(0, whole) < len(whole):
            raise TierFileError("short", f"the header of {length} bytes is cut")
        body = whole
    return _decode(name, nbytes, geometry, body=body[PREAMBLE.size :], digest=digest)


def ranges_of(name: str, header: Header) -> FileItems:
    """Where the items of a file are in it."""
    start = len(encode(header))
    found = zip(header.offsets, header.sizes, header.digests, strict=True)
    ranges = tuple(FileRange(name, start + offset, n, digest) for offset, n, digest in found)
    return FileItems(name, header.items, ranges)


def check(found: FileRange, content: memoryview) -> None:
    """Raises TierFileError if the bytes are not those that were written."""
    if xxhash.xxh3_64_intdigest(content) != found.xxh3:
        raise TierFileError("corrupt", f"{found.name}: bytes {found.offset} on are damaged")


def _decode(name: str, nbytes: int, geometry: str, *, body: memoryview, digest: int) -> FileItems:
    if xxhash.xxh3_64_intdigest(body) != digest:
        raise TierFileError("corrupt", "the header is damaged")
    try:
        header = msgspec.msgpack.decode(body, type=learned(Header))
        files = ranges_of(name, header)
    except (msgspec.MsgspecError, ValueError) as error:
        raise TierFileError("corrupt", f"the header cannot be read: {error}") from error
    if header.geometry != geometry:
        raise TierFileError("foreign", f"geometry {header.geometry}, not {geometry}")
    if not all(item.boundaries and 0 <= item.start <= item.end for item in header.items):
        raise TierFileError("corrupt", "an item has no tokens")
    if _end(files.ranges) > nbytes:
        raise TierFileError("short", f"{nbytes} bytes of {_end(files.ranges)}")
    return files


def _end(ranges: Sequence[FileRange]) -> int:
    return max((one.offset + one.nbytes for one in ranges), default=0)
