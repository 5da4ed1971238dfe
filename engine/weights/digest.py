"""A digest of every byte of a model's tensors, computed while they are loaded. Torch-free.

It is the sum of the digests of all blocks of all tensors, so neither the number nor the names of
the files count, nor the order of tensors in them. Tensors that a model does not load count too.

Digests of files are kept beside the weights, for all nodes that read them, or else in the user's
cache folder; where neither can be written to, each start computes anew. A record that is damaged,
or is of another file or of one that was written since, is ignored.
"""

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Final

import msgspec
import structlog
import xxhash

from engine.errors import CheckpointError
from engine.model_files import read_bytes, weight_files
from engine.safetensors_headers import StoredTensor
from engine.struct_types import learned
from engine.weights.files import FileStat, WeightFiles

VERSION: Final = 2
"""Goes up where the same tensors get another digest."""
BESIDE: Final = ".tandem-weights.json"
MAX_RECORD_BYTES: Final = 4 << 20
MAX_RECORDS: Final = 256
"""In the user's cache folder: of models that were used last."""
TICK_NS: Final = 2_000_000_000
"""The coarsest clock of a file system: what was written so lately may change unseen."""


class _Known(msgspec.Struct, frozen=True):
    """One file and its digest, 32 hex digits."""

    name: str
    stat: tuple[int, int, int, int]
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class _Record(msgspec.Struct, frozen=True):
    """The file of known digests; `check` is the digest of the rest."""

    version: int
    files: tuple[_Known, ...]
    check: str


class DigestCache:
    """The records of one model folder."""

    def __init__(self, folder: Path) -> None:
        own = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:32]
        self._places = [folder / BESIDE]
        # As the XDG Base Directory Specification says: relative paths do not count.
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        if os.path.isabs(home):
            self._places.append(Path(home) / "tandem" / f"weights-{own}.json")

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
        # A later write within the same tick of the clock would leave `stats` as they are.
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
        found = ((path.stat().st_mtime_ns, path) for path in place.parent.glob("weights-*.json"))
        for _, old in sorted(found)[:-MAX_RECORDS]:
            old.unlink(missing_ok=True)


MODULUS: Final = 1 << 128

log = structlog.get_logger()


class WeightsDigest:
    """The digest of the weights in `files`; make it before they are read.

    Blocks are hashed by the threads that read them. A file whose digest is known is not hashed.
    """

    def __init__(self, files: WeightFiles) -> None:
        self._files = files
        self._cache = DigestCache(files.folder)
        self._digests = self._cache.find(files.stats)
        self._sums = dict.fromkeys(sorted(files.stats.keys() - self._digests.keys()), 0)
        self._lock = threading.Lock()
        files.heard_by = self._add

    def result(self) -> str:
        """32 hex digits; reads what is left and closes the files. Call it after all was loaded.

        Raises CheckpointError for files that cannot be read, or that changed since they were
        opened.
        """
        for tensor in self._files.unread:
            if tensor.path.name in self._sums:
                self._files.read(tensor)
        # Before the log goes on: a bar shares its terminal.
        self._files.close()
        folder, stats = self._files.folder, self._files.stats
        if _stats(folder) != stats:
            raise CheckpointError(
                f"the weights in {folder} changed while they were loaded; start again once "
                "they are whole"
            )
        digests = self._digests | {name: _hex(number) for name, number in self._sums.items()}
        kept = self._cache.keep(stats, digests) if self._sums else None
        digest = _hex(sum(int(digest, 16) for digest in digests.values()))
        log.info(
            "the weights are identified",
            digest=digest,
            bytes_hashed=sum(stats[name].size for name in self._sums),
            bytes_known=sum(stats[name].size for name in self._digests),
            kept_in=None if kept is None else str(kept),
        )
        return digest

    def _add(self, tensor: StoredTensor, offset: int, block: memoryview) -> None:
        if tensor.path.name not in self._sums:
            return
        named = msgspec.json.encode((tensor.name, tensor.dtype, tensor.shape, offset))
        digest = xxhash.xxh3_128(named)
        digest.update(block)
        with self._lock:
            self._sums[tensor.path.name] += digest.intdigest()


def _stats(folder: Path) -> Mapping[str, FileStat]:
    """By name, of each file of the weights, now."""
    found = {}
    for path in weight_files(folder):
        try:
            found[path.name] = FileStat.of(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return found


def _hex(digest: int) -> str:
    return f"{digest % MODULUS:032x}"
