"""The calls to the file system that the disk tier makes, in one place."""

import os
import secrets
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple

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
        file = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            num_read = 0
            while num_read < len(target):
                more = os.preadv(file, [target[num_read:]], offset + num_read)
                if not more:
                    break
                num_read += more
            return num_read
        finally:
            os.close(file)

    def read_ahead(self, name: str, offset: int, nbytes: int) -> None:
        """Tells the kernel to begin to read so many bytes, for a `read` that comes soon."""
        file = os.open(self.folder / name, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.posix_fadvise(file, offset, nbytes, os.POSIX_FADV_WILLNEED)
        finally:
            os.close(file)

    def write(self, name: str, parts: Sequence[memoryview]) -> None:
        """A new file of these bytes, under its name only once it is whole."""
        temporary = self.folder / f"{name}.tmp"
        try:
            with open(temporary, "xb", buffering=0, opener=_for_this_user) as file:
                for part in parts:
                    _write_all(file, part)
            temporary.rename(self.folder / name)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise

    def touch(self, name: str) -> None:
        """It is used now."""
        os.utime(self.folder / name)

    def remove(self, name: str) -> None:
        """It goes; it may have gone already."""
        (self.folder / name).unlink(missing_ok=True)


def _for_this_user(path: str, flags: int) -> int:
    return os.open(path, flags, FILE_MODE)


def _write_all(file: FileIO, content: memoryview) -> None:
    while content:
        content = content[file.write(content) :]
