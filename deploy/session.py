"""What an embedded Ray needs before it starts: folder, token, environment. Imports no ray."""

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from deploy.process_tree import end_descendants
from deploy.signals import ignore_signals

FOLDER_PREFIX = "tandem-ray-"
END_S = 3.0


@dataclass(slots=True, frozen=True)
class Session:
    """The folder of one embedded Ray, which only this user may enter."""

    folder: Path

    @property
    def ray_folder(self) -> Path:
        """For sockets and logs. Ray opens it to everybody, so the token must lie elsewhere."""
        return self.folder / "ray"

    @property
    def token_path(self) -> Path:
        """What lets a process of this user in."""
        return self.folder / "token"

    def environment(self) -> dict[str, str]:
        """For this process, before it imports ray, and so for all that Ray starts."""
        return {**embedded_environment(self.token_path), "TMPDIR": str(self.folder)}


def embedded_environment(token_path: Path) -> dict[str, str]:
    """What reaches an embedded Ray: only with the token, and only from this machine."""
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token_path),
        # Despite its name: with 0, Ray binds its ports to the loopback address, on Linux too.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@contextmanager
def new_session() -> Iterator[Session]:
    """At the end no process below this one is left, and the folder is gone."""
    session = Session(Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)))
    try:
        session.ray_folder.mkdir()
        session.token_path.touch(mode=0o600)
        session.token_path.write_text(secrets.token_hex(32))
        yield session
    finally:
        ignore_signals()
        end_descendants(os.getpid(), END_S)
        shutil.rmtree(session.folder, ignore_errors=True)
