"""`python -m deploy up|status|down`: a whole Tandem cluster on Ray. Owns the environment of Ray."""

import importlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.table import Table

from deploy.config import ClusterState, load_cluster
from engine.errors import ConfigError, TandemError, UnavailableError

DOWN_S = 90.0
Address = Annotated[str | None, typer.Option(help="A running Ray cluster. [embedded Ray]")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.command()
def up(
    cluster: Annotated[Path | None, typer.Argument(help="cluster.yaml [1 P, 1 D, proxy]")] = None,
    address: Address = None,
) -> None:
    """Start a cluster; with embedded Ray it runs until Ctrl-C or SIGTERM."""
    config, source = load_cluster(cluster), str(cluster or "built-in cluster")
    if address is None and _state_file().exists():
        raise ConfigError(f"a cluster is up already, see {_state_file()}: run down first")
    folder = Path(tempfile.mkdtemp(prefix="tandem-"))
    try:
        ray_cluster = _with_ray(None if address else _new_token(folder), folder)
        with ray_cluster.connected(address) as gcs:
            stop = _stop_event()
            with console.status("starting") as status:
                members = ray_cluster.start_cluster(config, source, status.update)
            console.print(_table(members))
            if address is None:
                _hold(ray_cluster, gcs, folder / "token", stop)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@app.command()
def status(address: Address = None) -> None:
    """Show the nodes of the running cluster."""
    state = None if address else _read_state()
    ray_cluster = _with_ray(Path(state.token_path) if state else None, None)
    with ray_cluster.connected(state.address if state else address):
        console.print(_table(ray_cluster.cluster_members()))


@app.command()
def down(address: Address = None) -> None:
    """Stop the cluster: proxy first, then decode, then prefill nodes."""
    if address is None:
        _ask_owner_to_stop(_read_state())
        return
    ray_cluster = _with_ray(None, None)
    with ray_cluster.connected(address):
        ray_cluster.stop_cluster(console.print)


def _with_ray(token_path: Path | None, folder: Path | None) -> Any:
    """deploy.ray_cluster, imported only now: Ray reads these variables when it is imported."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if token_path is not None:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_path)
    if folder is not None and token_path is not None:
        os.environ["RAY_TMPDIR"] = str(folder)
    if os.environ.get("RAY_AUTH_MODE") != "token":
        console.print("[yellow]warning:[/] Ray runs without RAY_AUTH_MODE=token")
    return importlib.import_module("deploy.ray_cluster")


def _new_token(folder: Path) -> Path:
    path = folder / "token"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return path


def _stop_event() -> threading.Event:
    """Set by SIGINT or SIGTERM; installed after ray.init, which installs its own handlers."""
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    return stop


def _hold(ray_cluster: Any, gcs: str, token: Path, stop: threading.Event) -> None:
    state, file = ClusterState(pid=os.getpid(), address=gcs, token_path=str(token)), _state_file()
    try:
        file.touch(mode=0o600)
        file.write_bytes(msgspec.json.encode(state))
        console.print("Ctrl-C stops the cluster")
        while not stop.wait(3600.0):
            pass
    finally:
        ray_cluster.stop_cluster(console.print)
        file.unlink(missing_ok=True)


def _state_file() -> Path:
    folder = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    return Path(folder) / f"tandem-{os.getuid()}.json"


def _read_state() -> ClusterState:
    file = _state_file()
    try:
        state = msgspec.json.decode(file.read_bytes(), type=ClusterState)
        os.kill(state.pid, 0)
    except FileNotFoundError as error:
        raise UnavailableError(f"no cluster is up (no {file})") from error
    except ProcessLookupError as error:
        file.unlink(missing_ok=True)
        raise UnavailableError("the process that ran the cluster is gone") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{file}: {error}") from error
    return state


def _ask_owner_to_stop(state: ClusterState) -> None:
    os.kill(state.pid, signal.SIGTERM)
    deadline = time.monotonic() + DOWN_S
    while _state_file().exists():
        if time.monotonic() > deadline:
            raise UnavailableError(f"process {state.pid} did not stop within {DOWN_S:g} s")
        time.sleep(0.1)


def _table(members: list[Any]) -> Table:
    table = Table("kind", "engine id", "URL", "Ray node", "pid")
    for member in members:
        row = (member.kind, member.engine_id, member.url, member.node_id[:12], str(member.pid))
        table.add_row(*row)
    return table


if __name__ == "__main__":
    try:
        app()
    except TandemError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from error
