"""`python -m deploy.demo`: one prompt, two nodes, and proof of one node's tokens."""

import asyncio
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import msgspec
import typer
from openai import AsyncOpenAI, DefaultAsyncHttpxClient
from rich.console import Console

from deploy.config import ClusterConfig, load_cluster
from deploy.demo.leftovers import Leftovers
from deploy.demo.talk import Exchange, Talk, table_of
from deploy.process import descendants, stop_on_signals
from deploy.session import new_session, shown_session, state_file
from engine.errors import TandemError
from engine.process import configure_logging

NAME = "tandem-demo"
EXAMPLES = """[bold]The cluster serves {url}/v1[/]

curl {url}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{name}", "prompt": "One morning, Mia", "max_tokens": 40, "temperature": 0}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
print(client.chat.completions.create(model="{name}", messages=[
    {{"role": "user", "content": "Leo has a drum. Iris has a coin. What does Iris have?"}}]))

Ctrl-C stops it."""


class Steps:
    """Says what happens, and when: seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = perf_counter()

    def __call__(self, text: str) -> None:
        seconds = perf_counter() - self._started
        self._console.print(f"[dim]{seconds:5.1f} s[/] {text}", highlight=False)


@contextmanager
def demo_cluster(
    port: int, steps: Steps, leftovers: Leftovers, *, state: Path | None = None
) -> Iterator[str]:
    """One P, one D and the proxy on an embedded Ray; yields the proxy's URL.

    `state` is the file by which `deploy status` and `down` see it.
    """
    config = _on_port(load_cluster(), port)
    with new_session() as session, shown_session(state, session) as show_address:
        leftovers.watch_folder(session.folder)
        os.environ.update(session.environment())
        steps("starting an embedded Ray, for which only this user has the token")
        # Ray reads its environment when it is imported.
        from deploy.ray_cluster import embedded, running

        with embedded(session.ray_folder, config.resources()) as address:
            show_address(address)
            with running(config, steps) as members:
                leftovers.watch_processes(descendants())
                yield members[-1].url
            steps("stopping Ray")


def show(console: Console) -> bool:
    """Runs the demo; whether the tokens are right and nothing is left."""
    steps = Steps(console)
    leftovers = Leftovers()
    with demo_cluster(0, steps, leftovers) as url:
        console.rule("through proxy, prefill node and decode node")
        pair = asyncio.run(_run(url, console))
        console.rule()
        steps("sending the same requests to a single kv_both node")
        alone = asyncio.run(_alone())
    console.print(table_of(pair))
    same = _compare(pair, alone, console)
    left = leftovers.find()
    for line in left:
        console.print(f"[bold red]left behind:[/] {line}", highlight=False)
    steps("done" if left else f"[green]nothing is left behind:[/] {leftovers.watched}")
    return same and not left


def keep(console: Console, port: int) -> None:
    """Keeps the cluster up until Ctrl-C or `deploy down`."""
    state = state_file(os.environ.get("XDG_RUNTIME_DIR"))
    with demo_cluster(port, Steps(console), Leftovers(), state=state) as url:
        text = EXAMPLES.format(url=url, name=NAME)
        console.print(text, highlight=False, soft_wrap=True)
        threading.Event().wait()


def _on_port(config: ClusterConfig, port: int) -> ClusterConfig:
    return msgspec.structs.replace(config, proxy={**config.proxy, "port": port})


async def _run(url: str, console: Console) -> list[Exchange]:
    direct = DefaultAsyncHttpxClient(trust_env=False)  # a proxy in the environment is not for us
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=60.0, http_client=direct
    ) as client:
        return await Talk(client, NAME, console).run()


async def _alone() -> list[Exchange]:
    """All requests to one node in this process, which prefills and decodes."""
    # Only now: importing torch takes seconds, in which nothing would be seen.
    from prefill_node.server import prefill_server

    node = prefill_server(load_cluster().node("prefill"))
    await node.start()
    try:
        return await _run(node.url, Console(quiet=True))
    finally:
        await node.close()


def _compare(pair: list[Exchange], alone: list[Exchange], console: Console) -> bool:
    differing = [
        left.name
        for left, right in zip(pair, alone, strict=True)
        if left.token_ids != right.token_ids or not left.token_ids
    ]
    if differing:
        console.print(f"[bold red]Tokens differ from those of one node in:[/] {differing}")
    else:
        count = sum(len(exchange.token_ids) for exchange in pair)
        console.print(f"[bold green]All {count} tokens equal those of a single kv_both node.[/]")
    return not differing


def main(
    stay: Annotated[
        bool, typer.Option("--keep", help="Stay up and print how to talk to it.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of the proxy with --keep.")] = 8000,
) -> None:
    """The main job of Tandem on this machine, in a minute."""
    stop_on_signals()
    configure_logging("WARNING")
    console = Console()
    try:
        if stay:
            keep(console, port)
        elif not show(console):
            raise typer.Exit(code=1)
    except KeyboardInterrupt as error:
        console.print("stopped")
        raise typer.Exit(code=0 if stay else 130) from error
    except TandemError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        raise typer.Exit(code=2) from error


if __name__ == "__main__":
    typer.run(main)
