"""`python -m deploy up|status|down`: a whole Tandem cluster on Ray. Owns Ray's environment."""

import os
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import psutil
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from deploy.config import DEMO_CLUSTER, load_cluster
from deploy.process import stop_on_signals, wait_gone
from deploy.session import Session, embedded_cluster, read_state, state_file
from engine.errors import TandemError, UnavailableError

if TYPE_CHECKING:
    from deploy.actors import Member

DOWN_S = 180.0
Address = Annotated[str | None, typer.Option(help="A running Ray cluster. [embedded Ray]")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@app.command()
def up(
    cluster: Annotated[Path, typer.Argument(help="The cluster file.")] = DEMO_CLUSTER,
    address: Address = None,
) -> None:
    """Start a cluster; with embedded Ray it runs until Ctrl-C, SIGTERM or `down`."""
    stop_on_signals()
    config = load_cluster(cluster)
    try:
        if address is not None:
            with _connected(address):
                from deploy.ray_cluster import start_cluster

                console.print(_table(start_cluster(config, _say)))
            return
        with embedded_cluster(config, os.environ, _say, state=_state_file()) as (session, members):
            console.print(_table(members))
            console.print(f"logs in {session.ray_folder}/session_latest/logs; Ctrl-C stops")
            threading.Event().wait()
    except KeyboardInterrupt:
        console.print("stopped")


@app.command()
def status(address: Address = None) -> None:
    """Show the members of the running cluster."""
    if address is None:
        state = read_state(_state_file())
        if not state.address:
            console.print("Ray is starting")
            return
        os.environ.update(Session(Path(state.folder)).environment())
        address = state.address
    with _connected(address):
        from deploy.ray_cluster import cluster_members

        members = cluster_members()
        console.print(_table(members) if members else "no cluster is up on this Ray")


@app.command()
def down(address: Address = None) -> None:
    """Stop the cluster: the proxy first, then decode, then prefill nodes."""
    if address is not None:
        with _connected(address):
            from deploy.ray_cluster import stop_cluster

            stop_cluster(_say)
        return
    state = read_state(_state_file())
    try:
        owner = psutil.Process(state.pid)
        owner.terminate()
        _say(f"waiting for process {state.pid} to stop the cluster")
    except psutil.NoSuchProcess as error:
        raise UnavailableError("the cluster ended by itself") from error
    # Its end is that of all it has started. Not `owner.wait`: that waits for a zombie until its
    # parent has asked for it.
    if wait_gone([owner], DOWN_S):
        raise UnavailableError(f"process {state.pid} did not stop within {DOWN_S:g} s")


def _connected(address: str) -> AbstractContextManager[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if os.environ.get("RAY_AUTH_MODE") != "token":
        console.print("[yellow]warning:[/] Ray runs without RAY_AUTH_MODE=token")
    from deploy.ray_cluster import connected

    return connected(address)


def _state_file() -> Path:
    return state_file(os.environ.get("XDG_RUNTIME_DIR"))


def _say(text: str) -> None:
    console.print(f"[dim]{time.strftime('%H:%M:%S')}[/] {text}", highlight=False)


def _table(members: list["Member"]) -> Table:
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0))
    for column in ("member", "URL", "engine id", "Ray node", "pid"):
        table.add_column(column, overflow="fold")
    for member in members:
        node = member.node_id[:8]
        table.add_row(member.name, member.url, member.engine_id, node, str(member.pid))
    return table


if __name__ == "__main__":
    try:
        app()
    except TandemError as error:
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(2) from error
