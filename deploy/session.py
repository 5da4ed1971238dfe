"""One embedded Ray: its folder, token and environment, and the file by which others find it.

`up` and the demo own a cluster; `status` and `down` read the file, and import no ray for that.
"""

import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from filelock import FileLock, Timeout
from msgspec import Meta

from deploy.config import ClusterConfig, NoClusterError
from deploy.placement import check_room
from deploy.process import end_descendants, ignore_signals
from engine.errors import ConfigError, DeadlineExceededError, UnavailableError
from serving.config import Config

if TYPE_CHECKING:
    from deploy.ray_cluster import Cluster

FOLDER_PREFIX = "tandem-ray-"
END_S = 3.0
LOOK_S = 1.0
"""Readers of the state hold its lock for a moment."""


class ClusterState(Config, frozen=True):
    """Process `pid` runs the cluster; `address` is that of its Ray, empty until it has started."""

    pid: Annotated[int, Meta(ge=1)]
    folder: str
    address: str = ""


@dataclass(slots=True, frozen=True)
class Session:
    """The folder of one embedded Ray, which only this user may enter."""

    folder: Path

    @property
    def ray_folder(self) -> Path:
        """For sockets and logs. Ray opens it to everybody, so the token must lie elsewhere."""
        return self.folder / "ray"

    @property
    def log_folder(self) -> Path:
        """Logs of Ray, and those of members, which have their names."""
        return self.ray_folder / "session_latest" / "logs"

    @property
    def token_path(self) -> Path:
        """The secret with which a process of this user reaches this Ray."""
        return self.folder / "token"

    def environment(self) -> dict[str, str]:
        """For a process, before it imports ray: it reaches this Ray by token, on this machine only.

        All that Ray starts inherits the owner's.
        """
        return {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.token_path),
            # Despite its name: with 0, Ray binds its ports to the loopback address, on Linux too.
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            # Members are servers: at Ray's 15 any other work on the machine starves them.
            "RAY_worker_niceness": "0",
            "TMPDIR": str(self.folder),
        }


@contextmanager
def embedded_cluster(
    config: ClusterConfig,
    environment: MutableMapping[str, str],
    progress: Callable[[str], None],
    *,
    state: Path | None,
) -> Iterator[tuple[Session, "Cluster"]]:
    """A cluster on a Ray of its own, whole, and up for as long as the block.

    `environment` is this process's. `state` is the file by which other commands see it. Logs of a
    cluster that fails are kept, and `progress` says where.
    """
    with new_session() as session, shown_session(state, session) as show_address:
        environment.update(session.environment())
        progress("starting an embedded Ray, for which only this user has the token")
        # Ray reads its environment when it is imported.
        from deploy.ray_cluster import Clusters, embedded

        with embedded(session.ray_folder, config.resources()) as (thread, address):
            show_address(address)
            cluster = Clusters(thread).named(config.name)
            try:
                check_room(cluster.plan(config))
                progress("starting the controller")
                cluster.apply(config, cluster.status())
                cluster.wait_until_whole(progress)
                yield session, cluster
            except (UnavailableError, DeadlineExceededError):
                progress(f"logs are kept in {_keep_logs(session)}")
                raise
            finally:
                ignore_signals()
                cluster.stop(progress)
                progress("stopping Ray")


def _keep_logs(session: Session) -> Path:
    """Copies the members' logs out of a folder that will be removed."""
    kept = Path(tempfile.mkdtemp(prefix="tandem-logs-"))
    for file in session.log_folder.glob("tandem-*.log"):
        shutil.copy(file, kept)
    return kept


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
        end_descendants(END_S)
        shutil.rmtree(session.folder, ignore_errors=True)


def state_file(runtime_folder: str | None) -> Path:
    """The state file of this user; `runtime_folder` is XDG_RUNTIME_DIR."""
    return Path(runtime_folder or tempfile.gettempdir()) / f"tandem-{os.getuid()}.json"


@contextmanager
def shown_session(file: Path | None, session: Session) -> Iterator[Callable[[str], None]]:
    """Shows the cluster of `session` to other commands; call the result with Ray's address.

    Without a file no command sees it, and other clusters may be up beside it. Raises ConfigError
    when `file` belongs to another cluster that is up.
    """
    if file is None:
        yield lambda address: None
        return
    state = ClusterState(pid=os.getpid(), folder=str(session.folder))
    lock = _acquire(file, LOOK_S)
    if lock is None:
        raise ConfigError(f"a cluster is up already, see {file}: run down first")
    try:
        _discard(file)
        _write(file, state)
        yield lambda address: _write(file, msgspec.structs.replace(state, address=address))
    finally:
        file.unlink(missing_ok=True)
        lock.release()


def read_state(file: Path) -> ClusterState:
    """Raises NoClusterError when no cluster is up, ConfigError for a file that is not ours."""
    lock = _acquire(file, 0.0)
    if lock is None:
        if (state := _decode(file)) is None:
            raise NoClusterError(f"no cluster is up (no {file})")
        return state
    try:
        is_stale = _discard(file)
    finally:
        lock.release()
    why = ": the process that ran one is gone" if is_stale else f" (no {file})"
    raise NoClusterError(f"no cluster is up{why}")


def _acquire(file: Path, seconds: float) -> FileLock | None:
    """The lock of a state file; None: the cluster's owner holds it, and so the owner lives.

    The kernel releases a lock when its process ends, however that ends.
    """
    lock = FileLock(file.with_suffix(".lock"), mode=0o600)
    try:
        lock.acquire(timeout=seconds)
    except Timeout:
        return None
    except OSError as error:
        raise ConfigError(f"{lock.lock_file}: {error.strerror}") from error
    return lock


def _write(file: Path, state: ClusterState) -> None:
    """Replaces the file in one step: a reader sees the old state or the new one."""
    new = file.with_suffix(".new")
    new.touch(mode=0o600)
    new.write_bytes(msgspec.json.encode(state))
    new.replace(file)


def _decode(file: Path) -> ClusterState | None:
    """None when there is no file."""
    try:
        if file.lstat().st_uid != os.getuid():
            raise ConfigError(f"{file} belongs to another user")
        return msgspec.json.decode(file.read_bytes(), type=ClusterState)
    except FileNotFoundError:
        return None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: {error}; remove it") from error


def _discard(file: Path) -> bool:
    """Removes what a killed owner has left, the folder of its Ray too; whether there was any."""
    state = _decode(file)
    if state is None:
        return False
    file.unlink(missing_ok=True)
    if Path(state.folder).name.startswith(FOLDER_PREFIX):
        shutil.rmtree(state.folder, ignore_errors=True)
    return True
