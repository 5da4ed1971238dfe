"""The file by which `status` and `down` find who runs an embedded cluster: `up`, `make serve`."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from deploy.process_tree import ProcessId, process_id
from deploy.session import FOLDER_PREFIX, Session
from engine.config import Config
from engine.errors import ConfigError, UnavailableError

Pid = Annotated[int, Meta(ge=1)]


class ClusterState(Config, frozen=True):
    """Who runs the cluster, and how to reach its Ray; `address` is empty until Ray has started."""

    pid: Pid
    started: int
    folder: str
    address: str = ""
    token_path: str = ""

    @property
    def owner(self) -> ProcessId:
        """The process that started the cluster, and stops it."""
        return ProcessId(self.pid, self.started)


def state_file(runtime_folder: str | None) -> Path:
    """Where this user's state is; `runtime_folder` is XDG_RUNTIME_DIR."""
    return Path(runtime_folder or tempfile.gettempdir()) / f"tandem-{os.getuid()}.json"


@contextmanager
def shown_session(file: Path | None, session: Session) -> Iterator[Callable[[str], None]]:
    """Other commands see the cluster of `session`, and its Ray once its address was told.

    Without a file nobody does, and there may be another one.
    """
    if file is None:
        yield lambda address: None
        return
    state = own_state(session.folder)
    reach = partial(msgspec.structs.replace, state, token_path=str(session.token_path))
    with claimed_state(file, state):
        yield lambda address: write_state(file, reach(address=address))


@contextmanager
def claimed_state(file: Path, state: ClusterState) -> Iterator[None]:
    """Holds `file` while the cluster is up. Raises ConfigError when another cluster is."""
    _discard_stale(file)
    try:
        descriptor = os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError as error:
        raise ConfigError(f"a cluster is up already, see {file}: run down first") from error
    try:
        with open(descriptor, "wb") as handle:
            handle.write(msgspec.json.encode(state))
        yield
    finally:
        file.unlink(missing_ok=True)


def write_state(file: Path, state: ClusterState) -> None:
    """Replaces the claimed file in one step."""
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_bytes(msgspec.json.encode(state))
    new.replace(file)


def read_state(file: Path) -> ClusterState:
    """Raises UnavailableError when no cluster is up, ConfigError for a file that is not ours."""
    try:
        if file.lstat().st_uid != os.getuid():
            raise ConfigError(f"{file} belongs to another user")
        state = msgspec.json.decode(file.read_bytes(), type=ClusterState)
    except FileNotFoundError as error:
        raise UnavailableError(f"no cluster is up (no {file})") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: {error}; remove it") from error
    if state.owner.is_alive:
        return state
    file.unlink(missing_ok=True)
    if Path(state.folder).name.startswith(FOLDER_PREFIX):
        shutil.rmtree(state.folder, ignore_errors=True)
    raise UnavailableError("no cluster is up: the process that ran one is gone")


def own_state(folder: Path) -> ClusterState:
    """The state of a cluster that this process is about to start."""
    me = process_id(os.getpid())
    assert me is not None
    return ClusterState(pid=me.pid, started=me.started, folder=str(folder))


def _discard_stale(file: Path) -> None:
    try:
        read_state(file)
    except UnavailableError:
        return
