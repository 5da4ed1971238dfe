"""`python -m deploy COMMAND`: Tandem clusters on Ray. Owns Ray's environment.

Exit status: 0 all is well, 1 a cluster is not whole or was lost, 2 a wrong option or file, 3 no
such cluster, 130 interrupted before it was whole.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import psutil
import typer
from rich.console import Console
from rich.live import Live

from deploy.config import DEMO_CLUSTER, ROLES, NoClusterError, Role, load_cluster
from deploy.kubernetes.render import render_k8s
from deploy.placement import check_hosts, check_room
from deploy.process import stop_on_signals, wait_gone
from deploy.report import arenas, changes, placement_table, status_table
from deploy.session import Session, embedded_cluster, read_state, state_file
from engine.errors import DeadlineExceededError, TandemError, UnavailableError

if TYPE_CHECKING:
    from deploy.ray_cluster import Cluster, Clusters

DOWN_S: Final = 180.0
LOOK_S: Final = 2.0
MAX_SILENT: Final = 3
"""Looks in a row that Ray may leave unanswered before it is taken for dead."""
NOT_WHOLE, WRONG, NO_CLUSTER, INTERRUPTED = 1, 2, 3, 130

Address = Annotated[
    str | None, typer.Option(help="A running Ray, HOST:PORT. [that of `up`, on this machine]")
]
Name = Annotated[str | None, typer.Option(help="The cluster's name. [the only one]")]
File = Annotated[Path, typer.Argument(help="The cluster file.")]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
render = typer.Typer(help="Write a cluster file in the form of another program.")
render.command("k8s")(render_k8s)
# A group with one command is a group only if it says so.
render.callback()(lambda: None)
app.add_typer(render, name="render")
console = Console(width=None if sys.stdout.isatty() else 160)


@app.command()
def up(cluster: File = DEMO_CLUSTER) -> None:
    """Start a Ray of its own with a cluster; both end with Ctrl-C, SIGTERM or `down`."""
    config = load_cluster(cluster)
    is_up = False
    try:
        with embedded_cluster(config, os.environ, _say, state=_state_file()) as (session, running):
            is_up = True
            console.print(status_table(running.status()))
            console.print(f"logs in {session.log_folder}; Ctrl-C stops")
            _watch(running)
    except KeyboardInterrupt:
        console.print("stopped")
        raise typer.Exit(0 if is_up else INTERRUPTED) from None


@app.command()
def apply(
    cluster: File,
    *,
    address: Address = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would change.")] = False,
    wait: Annotated[bool, typer.Option(help="Return when all members serve.")] = True,
) -> None:
    """Bring a cluster on a running Ray to what the file says, members one after the other."""
    config = load_cluster(cluster)
    with _clusters(address) as clusters:
        running = clusters.named(config.name)
        before = running.status()
        planned = running.plan(config)
        there = {it.told.node_ip for it in before.members if it.told is not None}
        check_hosts(config, planned, there)
        console.print(*changes(before.config, config), sep="\n", highlight=False, markup=False)
        if planned:
            console.print(placement_table(planned))
        if dry_run:
            raise typer.Exit(NOT_WHOLE if any(it.machine is None for it in planned) else 0)
        if wait and before.config is None:
            check_room(planned)
        if before.config is None:
            _say("starting the controller")
        running.apply(config, before)
        if wait:
            _wait(running, is_new=before.config is None)


@app.command()
def plan(cluster: File, address: Address = None) -> None:
    """Show where the members of a file would be placed, whether they fit, and their arenas."""
    config = load_cluster(cluster)
    with _clusters(address) as clusters:
        planned = clusters.named(config.name).plan(config)
        console.print(placement_table(planned))
        console.print(*arenas(config), sep="\n\n", highlight=False, markup=False)
        check_hosts(config, planned)
    if any(it.machine is None for it in planned):
        raise typer.Exit(NOT_WHOLE)


@app.command()
def scale(
    replicas: Annotated[list[str], typer.Argument(help="As decode=3, several at once.")],
    *,
    address: Address = None,
    name: Name = None,
    wait: Annotated[bool, typer.Option(help="Return when all members serve.")] = True,
) -> None:
    """Change how many members a role has."""
    wanted = [_replicas(text) for text in replicas]
    with _clusters(address) as clusters:
        running = clusters.only(name)
        for role, number in wanted:
            running.scale(role, number)
        if wait:
            _wait(running)


@app.command()
def drain(
    member: Annotated[str, typer.Argument(help="As decode-1.")],
    *,
    address: Address = None,
    name: Name = None,
    wait: Annotated[bool, typer.Option(help="Return when it has ended.")] = True,
) -> None:
    """Let a member finish what it has and end; nobody takes its place."""
    with _clusters(address) as clusters:
        running = clusters.only(name)
        running.drain(member)
        if wait:
            _wait(running)


@app.command()
def restart(
    members: Annotated[
        list[str] | None, typer.Argument(help="Members or roles. [all nodes]")
    ] = None,
    *,
    address: Address = None,
    name: Name = None,
    wait: Annotated[bool, typer.Option(help="Return when all are new.")] = True,
) -> None:
    """Replace members one after the other, each once the new one serves."""
    with _clusters(address) as clusters:
        running = clusters.only(name)
        _say(f"replacing {', '.join(running.restart(members or []))}")
        if wait:
            _wait(running)


@app.command()
def status(
    address: Address = None,
    name: Name = None,
    watch: Annotated[bool, typer.Option("--watch", help="Show it again and again.")] = False,
) -> None:
    """Show the members beside what is wanted; exit status 1 if something is missing."""
    with _clusters(address) as clusters:
        running = clusters.only(name)
        if watch:
            _show_again_and_again(running)
        now = running.status()
        console.print(status_table(now))
        if not now.is_whole:
            raise typer.Exit(NOT_WHOLE)


@app.command()
def logs(
    member: Annotated[str, typer.Argument(help="As decode-1.")],
    *,
    address: Address = None,
    name: Name = None,
    lines: Annotated[int, typer.Option(min=1, max=100_000, help="From its end.")] = 200,
) -> None:
    """Show the end of a member's log, also of one that has failed."""
    with _clusters(address) as clusters:
        typer.echo(clusters.only(name).read_log(member, lines))


@app.command()
def down(address: Address = None, name: Name = None) -> None:
    """Stop a cluster: the proxies first, then decode, then prefill nodes."""
    if address is None:
        _end_owner()
        return
    with _clusters(address) as clusters:
        clusters.only(name).stop(_say)


def _watch(running: "Cluster") -> None:
    """Says what happens, until Ctrl-C. Raises UnavailableError when Ray is gone."""
    num_silent, seen = 0, time.time()
    while True:
        time.sleep(LOOK_S)
        try:
            events = [it for it in running.status().events if it[0] > seen]
        except (UnavailableError, DeadlineExceededError) as error:
            num_silent += 1
            if num_silent >= MAX_SILENT:
                raise UnavailableError(f"Ray is lost, and with it the cluster: {error}") from error
            continue
        num_silent = 0
        for at, text in events:
            seen = at
            _say(text)


def _wait(running: "Cluster", *, is_new: bool = False) -> None:
    """Until the cluster is whole; one that was never whole is stopped again if it cannot be."""
    try:
        console.print(status_table(running.wait_until_whole(_say)))
    except (TandemError, KeyboardInterrupt) as error:
        if is_new:
            running.stop(_say)
        else:
            _say("the cluster goes on towards what was asked for; `status` shows it")
        if isinstance(error, KeyboardInterrupt):
            raise typer.Exit(INTERRUPTED) from None
        raise


def _show_again_and_again(running: "Cluster") -> NoReturn:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(status_table(running.status()), refresh=True)
            time.sleep(LOOK_S)


def _replicas(text: str) -> tuple[Role, int]:
    name, _, number = text.partition("=")
    for role in ROLES:
        if name == role and number.isdecimal():
            return role, int(number)
    raise typer.BadParameter(f"{text!r}: write ROLE=NUMBER, with {', '.join(ROLES)}")


def _end_owner() -> None:
    """The process of `up` ends its cluster and its Ray."""
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


@contextmanager
def _clusters(address: str | None) -> Iterator["Clusters"]:
    """The clusters of a running Ray, or of the one that `up` has started on this machine."""
    if address is None:
        state = read_state(_state_file())
        if not state.address:
            raise UnavailableError("its Ray is starting: try again in some seconds")
        os.environ.update(Session(Path(state.folder)).environment())
        address = state.address
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    if os.environ.get("RAY_AUTH_MODE") != "token":
        _say("warning: Ray runs without RAY_AUTH_MODE=token: whoever reaches its ports runs code")
    from deploy.ray_cluster import Clusters, connected

    try:
        with connected(address) as thread:
            yield Clusters(thread)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _state_file() -> Path:
    return state_file(os.environ.get("XDG_RUNTIME_DIR"))


def _say(text: str) -> None:
    console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False, style="dim")


def _run() -> int:
    """The exit status."""
    stop_on_signals()
    try:
        app()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else WRONG
    except TandemError as error:
        typer.echo(f"error: {error}", err=True)
        return NO_CLUSTER if isinstance(error, NoClusterError) else WRONG
    return 0


if __name__ == "__main__":
    code = _run()
    sys.stdout.flush()
    sys.stderr.flush()
    # At once: what Ray does at the end of a process waits for ever for a Ray that is dead.
    os._exit(code)
