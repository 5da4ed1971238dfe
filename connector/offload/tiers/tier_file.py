"""The files of the disk tier: their format, and the calls to the file system.

    0        8        12       16       24                     4096 x n
    | magic  | version| length | xxh3   | header, MessagePack | data: item after item |

`length` and `xxh3` are those of the header; each item has its own digest in it. All numbers are
little-endian. Any damage is a `TierFileError` that names its cause.
"""

import os
import secrets
import struct
from collections.abc import Callable, Sequence
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import xxhash

from connector.offload.messages import FileItems, FileRange, Item
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
    """A file's description of itself. `geometry`: see `ChunkPlan.geometry`.

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
    body = body[PREAMBLE.size :]
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
    end = max((one.offset + one.nbytes for one in files.ranges), default=0)
    if end > nbytes:
        raise TierFileError("short", f"{nbytes} bytes of {end}")
    return files


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


FOLDER_MODE, FILE_MODE = 0o700, 0o600


class FoundFile(NamedTuple):
    """One file of a folder: its bytes, and when it was last used, in nanoseconds."""

    name: str
    nbytes: int
    used_ns: int


class Files:
    """The files of one folder, which is made if it is missing. All calls may raise OSError.

    They hold prompts, so files and a new folder are for this user alone, whatever the umask is; the
    modes of a folder that is there are not changed.

    Nothing is synced to the device: what a crash of the machine leaves half written is found by its
    digests, and counts as missing.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(FOLDER_MODE, parents=True, exist_ok=True)

    def check(self) -> None:
        """Raises OSError if no file can be written here."""
        name = f"check-{secrets.token_hex(8)}"
        self.write(name, (memoryview(b"tandem"),))
        self.remove(name)

    def is_open_to_others(self) -> bool:
        """True if users other than the folder's owner may list or enter it."""
        return bool(self.folder.stat().st_mode & ~FOLDER_MODE & 0o777)

    def changed_ns(self) -> int:
        """When a file last came or went."""
        return self.folder.stat().st_mtime_ns

    def scan(self) -> list[FoundFile]:
        """All files; those that vanish meanwhile are left out."""
        found = []
        with os.scandir(self.folder) as entries:
            for entry in entries:
                try:
                    stat = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append(FoundFile(entry.name, stat.st_size, stat.st_mtime_ns))
        return found

    def read(self, name: str, offset: int, target: memoryview) -> int:
        """Fills `target` from byte `offset` on; returns the bytes read, fewer at the end."""
        num_read = 0
        with open(self.folder / name, "rb", buffering=0) as file:
            while num_read < len(target):
                more = os.preadv(file.fileno(), [target[num_read:]], offset + num_read)
                if not more:
                    break
                num_read += more
        return num_read

    def read_ahead(self, name: str, offset: int, nbytes: int) -> None:
        """Tells the kernel to begin to read so many bytes, for a `read` that comes soon."""
        with open(self.folder / name, "rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), offset, nbytes, os.POSIX_FADV_WILLNEED)

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """A new file of these bytes, under its name only once it is whole."""
        temporary = self.folder / f"{name}.tmp"
        try:
            with open(temporary, "xb", buffering=0, opener=partial(os.open, mode=FILE_MODE)) as out:
                for part in parts:
                    _write_all(out, part)
            temporary.rename(self.folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def touch(self, name: str) -> None:
        """Marks a file as used now."""
        os.utime(self.folder / name)

    def remove(self, name: str) -> None:
        """Removes a file, which may have gone already."""
        (self.folder / name).unlink(missing_ok=True)


def _write_all(file: FileIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]
