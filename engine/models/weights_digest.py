"""A digest of every byte of a model's tensors, computed while they are loaded. Torch-free.

It is the sum of the tensors' own digests, so neither the number nor the names of the files count,
nor the order of tensors in them. Tensors that a model does not load count like the others.

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
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Final, NamedTuple, Self

import msgspec
import structlog
import xxhash

from engine.errors import CheckpointError
from engine.model_files import read_bytes, weight_files
from engine.struct_types import learned

VERSION: Final = 1
BESIDE: Final = ".tandem-weights.json"
MAX_RECORD_BYTES: Final = 4 << 20
MAX_RECORDS: Final = 256
"""In the user's cache folder: of models that were used last."""
TICK_NS: Final = 2_000_000_000
"""The coarsest clock of a file system: what was written so lately may change unseen."""


class FileStat(NamedTuple):
    """Marks of a file that differ from another's, and change when it is written again.

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


THREADS: Final = 4
BLOCK_BYTES: Final = 8 << 20
MAX_HEADER: Final = 100_000_000
"""Of a safetensors file; its own readers take no more."""
MODULUS: Final = 1 << 128

log = structlog.get_logger()


class _Stored(msgspec.Struct, frozen=True):
    """One tensor in the header of a safetensors file; offsets are from the header's end."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class _Tensor(NamedTuple):
    """One tensor's place in its file, and the bytes that name it: name, type and shape."""

    named: bytes
    start: int
    end: int


class WeightsDigest:
    """The digest of the weights in `folder`; threads compute it inside the `with` block.

    They end with the block, whether they are done or not.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        # One thread more than read: it waits for the others.
        self._pool = ThreadPoolExecutor(1 + THREADS, "weights-digest")

    def __enter__(self) -> Self:
        self._found: Future[tuple[str, Mapping[str, FileStat]]] = self._pool.submit(self._find)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._pool.shutdown()

    def result(self) -> str:
        """32 hex digits; waits for them. Call it after the weights were loaded.

        Raises CheckpointError for files that cannot be read, or that changed since the block began.
        """
        digest, stats = self._found.result()
        if _stats(self._folder) != stats:
            raise CheckpointError(
                f"the weights in {self._folder} changed while they were loaded; start again once "
                "they are whole"
            )
        return digest

    def _find(self) -> tuple[str, Mapping[str, FileStat]]:
        started, stats = time.monotonic(), _stats(self._folder)
        cache = DigestCache(self._folder)
        digests = cache.find(stats)
        missing = sorted(stats.keys() - digests.keys())
        for name in missing:
            digests[name] = self._of_file(self._folder / name)
        kept = cache.keep(stats, digests) if missing else None
        digest = _hex(sum(int(digest, 16) for digest in digests.values()))
        log.info(
            "the weights are identified",
            digest=digest,
            bytes_hashed=sum(stats[name].size for name in missing),
            bytes_known=sum(stat.size for name, stat in stats.items() if name not in missing),
            seconds=round(time.monotonic() - started, 2),
            kept_in=None if kept is None else str(kept),
        )
        return digest, stats

    def _of_file(self, path: Path) -> str:
        try:
            with path.open("rb", buffering=0) as file:
                tensors = _tensors(path, file.fileno())
                read = partial(self._of_tensor, path, file.fileno())
                return _hex(sum(self._pool.map(read, tensors)))
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error

    def _of_tensor(self, path: Path, descriptor: int, tensor: _Tensor) -> int:
        digest = xxhash.xxh3_128(tensor.named)
        position = tensor.start
        block = memoryview(bytearray(max(min(BLOCK_BYTES, tensor.end - tensor.start), 0)))
        while position < tensor.end:
            if self._stop.is_set():
                raise CheckpointError(f"{path} is not needed any more")
            wanted = block[: tensor.end - position]
            if not (count := os.preadv(descriptor, [wanted], position)):
                raise CheckpointError(f"{path} cannot be read: it ends inside a tensor")
            digest.update(block[:count])
            position += count
        return digest.intdigest()


def _stats(folder: Path) -> Mapping[str, FileStat]:
    """By name, of each file of the weights."""
    found = {}
    for path in weight_files(folder):
        try:
            found[path.name] = FileStat.of(path)
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    return found


def _tensors(path: Path, descriptor: int) -> list[_Tensor]:
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    header = os.pread(descriptor, length, 8) if length <= MAX_HEADER else b""
    try:
        entries = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        entries.pop("__metadata__", None)
        stored = {
            name: msgspec.json.decode(entry, type=learned(_Stored))
            for name, entry in entries.items()
        }
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: no safetensors header: {error}") from error
    start = 8 + length
    return [
        _Tensor(
            msgspec.json.encode((name, it.dtype, it.shape)),
            start + it.data_offsets[0],
            start + it.data_offsets[1],
        )
        for name, it in stored.items()
    ]


def _hex(digest: int) -> str:
    return f"{digest % MODULUS:032x}"
