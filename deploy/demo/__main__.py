"""`python -m deploy.demo`: one prompt, two nodes or more, and proof of one node's tokens."""

import asyncio
import os
import threading
from time import perf_counter
from typing import Annotated

import typer
from msgspec import structs
from rich.console import Console

from deploy.config import ClusterConfig, load_cluster
from deploy.demo.talk import TURNS, Exchange, Talk, choices_of, table_of
from deploy.process import stop_on_signals
from deploy.report import urls_of_proxies
from deploy.session import embedded_cluster, state_file
from engine.errors import TandemError
from serving.process import configure_logging

NAME = "tandem-demo"
EXAMPLES = """[bold]The cluster serves {url}/v1[/]

curl {url}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{name}", "prompt": "One morning, Mia", "max_tokens": 40, "temperature": 0}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
answer = client.chat.completions.create(model="{name}", temperature=0, messages=[
    {{"role": "user", "content": "{question}"}}])
print(answer.choices[0].message.content)

Ctrl-C stops it."""


class Steps:
    """Says what happens, and when: seconds since the start."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = perf_counter()

    def __call__(self, text: str) -> None:
        seconds = perf_counter() - self._started
        self._console.print(f"[dim]{seconds:5.1f} s[/] {text}", highlight=False)


def show(console: Console, config: ClusterConfig) -> bool:
    """Runs the demo; whether the tokens are right."""
    steps = Steps(console)
    with embedded_cluster(config, os.environ, steps, state=None) as (_, cluster):
        members = [it.told for it in cluster.status().members if it.told is not None]
        console.rule("through proxy, prefill node and decode node")
        pair = asyncio.run(_run(urls_of_proxies(cluster.status())[0], console))
        console.rule()
        steps("sending the same requests to a single kv_both node")
        alone = asyncio.run(_alone())
    console.print(table_of(pair))
    if max(config.prefill.replicas, config.decode.replicas) > 1:
        console.print(choices_of(pair, {told.rpc_url: told.birth.name for told in members}))
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


def keep(console: Console, config: ClusterConfig) -> None:
    """Keeps the cluster up until Ctrl-C or `deploy down`."""
    state = state_file(os.environ.get("XDG_RUNTIME_DIR"))
    with embedded_cluster(config, os.environ, Steps(console), state=state) as (_, cluster):
        url = urls_of_proxies(cluster.status())[0]
        text = EXAMPLES.format(url=url, name=NAME, question=TURNS[0])
        console.print(text, highlight=False, soft_wrap=True)
        threading.Event().wait()


async def _run(url: str, console: Console) -> list[Exchange]:
    # Optional, and `--help` needs none of it.
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    direct = DefaultAsyncHttpxClient(trust_env=False)  # a proxy in the environment is not for us
    async with AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", timeout=60.0, http_client=direct
    ) as client:
        return await Talk(client, NAME, console).run()


async def _alone() -> list[Exchange]:
    """All requests to one node in this process, which prefills and decodes."""
    # Only now: importing torch takes seconds, in which nothing would be seen.
    from connector.registry import builder_of
    from serving.node.server import NodeServer

    node = NodeServer(load_cluster().node("prefill"), "prefill", builder_of)
    await node.start()
    try:
        return await _run(node.url, Console(quiet=True))
    finally:
        await node.close()


def main(
    stay: Annotated[
        bool, typer.Option("--keep", help="Stay up and print how to talk to it.")
    ] = False,
    port: Annotated[int, typer.Option(help="Port of the proxy with --keep.")] = 8000,
    *,
    prefill: Annotated[int, typer.Option(min=1, max=8, help="Prefill nodes.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=8, help="Decode nodes.")] = 1,
) -> None:
    """The main job of Tandem on this machine, in a minute."""
    stop_on_signals()
    configure_logging("warning")
    console = Console()
    config = load_cluster()
    config = structs.replace(
        config,
        prefill=structs.replace(config.prefill, replicas=prefill),
        decode=structs.replace(config.decode, replicas=decode),
        proxy=structs.replace(
            config.proxy, config={**config.proxy.config, "port": port if stay else 0}
        ),
    )
    try:
        if stay:
            keep(console, config)
        elif not show(console, config):
            raise typer.Exit(code=1)
    except KeyboardInterrupt as error:
        console.print("stopped")
        raise typer.Exit(code=0 if stay else 130) from error
    except TandemError as error:
        console.print(f"[bold red]error:[/] {error}", highlight=False)
        raise typer.Exit(code=2) from error


if __name__ == "__main__":
    typer.run(main)
