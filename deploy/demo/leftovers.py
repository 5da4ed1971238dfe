"""Finds what the demo has left on the machine: processes, folders, shared memory. All must go."""

import os
from collections.abc import Iterable
from pathlib import Path

import psutil

from deploy.process import descendants, wait_gone

SHARED_MEMORY = Path("/dev/shm")
END_S = 5.0


class Leftovers:
    """Remembers what there is at the start, and what the demo made; `find` compares."""

    def __init__(self) -> None:
        self._shared_memory = _shared_memory()
        self._processes: set[psutil.Process] = set()
        self._folders: list[Path] = []

    def watch_processes(self, processes: Iterable[psutil.Process]) -> None:
        """These must be gone in the end."""
        self._processes.update(processes)

    def watch_folder(self, folder: Path) -> None:
        """This must be gone in the end."""
        self._folders.append(folder)

    @property
    def watched(self) -> str:
        """In words, for people."""
        return f"{len(self._processes)} processes, their files, shared memory"

    def find(self, seconds: float = END_S) -> list[str]:
        """Everything that is still there; processes have `seconds` to end."""
        left = wait_gone(self._processes | descendants(), seconds)
        return [
            *(f"process {process.pid}" for process in left),
            *(str(folder) for folder in self._folders if folder.exists()),
            *(str(file) for file in sorted(_shared_memory() - self._shared_memory)),
        ]


def _shared_memory() -> set[Path]:
    """Files of this user, except those that a living process uses."""
    files = [file for file in SHARED_MEMORY.iterdir() if _is_mine(file)]
    used = "".join(_text(maps) for maps in Path("/proc").glob("[0-9]*/maps")) if files else ""
    return {file for file in files if str(file) not in used}


def _is_mine(file: Path) -> bool:
    try:
        return file.lstat().st_uid == os.getuid()
    except FileNotFoundError:
        return False


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
