"""Digests of weight files that earlier starts have computed, found again by the files' stat.

Kept beside the weights, for all nodes that read them, or else in the user's cache folder; where
neither can be written to, each start computes anew. A record that is damaged, or is of another file
or of one that was written since, is as good as none.
"""

import hashlib
import os
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import msgspec
import xxhash

from engine.errors import CheckpointError
from engine.model_files import read_bytes
from engine.struct_types import learned

VERSION: Final = 1
BESIDE: Final = ".tandem-weights.json"
MAX_RECORD_BYTES: Final = 4 << 20
MAX_RECORDS: Final = 256
"""In the user's cache folder: of models that were used last."""
TICK_NS: Final = 2_000_000_000
"""The coarsest clock of a file system: what was written so lately may change unseen."""


class FileStat(NamedTuple):
    """What tells a file from another, and from itself before it was written again.

    `changed_ns` is set by the kernel alone: a copy that keeps `mtime_ns` does not keep this one.
    """

    size: int
    mtime_ns: int
    changed_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path) -> "FileStat":
        """May raise OSError."""
        found = path.stat()
        return cls(found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)


class _Known(msgspec.Struct, frozen=True):
    """One file and its digest, 32 hex digits."""

    name: str
    stat: tuple[int, int, int, int]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class _Record(msgspec.Struct, frozen=True):
    """What is written; `check` is the digest of the rest."""

    version: int
    files: tuple[_Known, ...]
    check: str


class DigestCache:
    """The records of one model folder."""

    def __init__(self, folder: Path) -> None:
        own = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        cache = _user_cache()
        self._places = [folder / BESIDE]
        if cache is not None:
            self._places.append(cache / f"weights-{own}.json")

    def find(self, stats: Mapping[str, FileStat]) -> dict[str, str]:
        """By name the digests of those files that are as they were; the others are left out."""
        return {
            known.name: known.digest
            for place in self._places
            for known in _read(place)
            if stats.get(known.name) == known.stat
        }

    def keep(self, stats: Mapping[str, FileStat], digests: Mapping[str, str]) -> Path | None:
        """Writes a record where it can; None where it cannot, or the files are too young."""
        youngest = max(max(stat.mtime_ns, stat.changed_ns) for stat in stats.values())
        if time.time_ns() - youngest < TICK_NS:
            return None
        files = tuple(_Known(name, stat, digests[name]) for name, stat in sorted(stats.items()))
        content = msgspec.json.encode(_Record(VERSION, files, _check(files)))
        for place in self._places:
            with suppress(OSError):
                _write(place, content)
                return place
        return None


def _read(place: Path) -> tuple[_Known, ...]:
    """The files of a record; none if it cannot be believed."""
    try:
        content = read_bytes(place, MAX_RECORD_BYTES)
        record = msgspec.json.decode(content or b"", type=learned(_Record))
    except (CheckpointError, msgspec.MsgspecError, UnicodeDecodeError):
        return ()
    is_whole = record.version == VERSION and record.check == _check(record.files)
    return record.files if is_whole else ()


def _check(files: tuple[_Known, ...]) -> str:
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode((VERSION, files)))


def _write(place: Path, content: bytes) -> None:
    """Under its name only once it is whole: nodes of one model start at the same time."""
    if place.name != BESIDE:
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = place.with_name(f"{place.name}.{secrets.token_hex(8)}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(place)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if place.name != BESIDE:
        for old in list(_oldest(place.parent))[:-MAX_RECORDS]:
            old.unlink(missing_ok=True)


def _oldest(cache: Path) -> Iterator[Path]:
    dated = [(path.stat().st_mtime_ns, path) for path in cache.glob("weights-*.json")]
    return (path for _, path in sorted(dated))


def _user_cache() -> Path | None:
    """As the XDG Base Directory Specification says: relative paths do not count."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(home) / "tandem" if os.path.isabs(home) else None
