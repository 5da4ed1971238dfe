"""`python -m deploy.demo`: one prompt, two nodes, and proof that the tokens are those of one node."""

import asyncio
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from openai import AsyncOpenAI
from rich.console import Console

from deploy.demo.processes import DemoCluster
from deploy.demo.talk import Exchange, run_exchanges, table_of

MODEL = Path(__file__).parent / "model"
NAME = "tandem-demo"
READY_TIMEOUT_S = 30.0


async def show(console: Console) -> bool:
    """Runs the demo; whether both ways gave the same tokens."""
    with console.status("starting a prefill node, a decode node and a proxy ..."):
        cluster = await DemoCluster(str(MODEL), NAME, 0).__aenter__()
    try:
        await _ready(cluster.proxy.url)
        console.rule("through prefill node, decode node and proxy")
        pair = await _run(cluster.proxy.url, console)
        console.rule("the same requests on the decode node alone")
        alone = await _run(cluster.decode.url, Console(quiet=True))
        console.print(table_of(pair))
        return _compare(pair, alone, console)
    finally:
        await cluster.__aexit__()


async def keep(console: Console, port: int) -> None:
    """Keeps the cluster up until Ctrl-C."""
    async with DemoCluster(str(MODEL), NAME, port) as cluster:
        url = cluster.proxy.url
        await _ready(url)
        console.print(f"""[bold]The cluster serves {url}/v1[/]

curl {url}/v1/completions -H 'Content-Type: application/json' \\
  -d '{{"model": "{NAME}", "prompt": "One morning, Mia", "max_tokens": 40, "temperature": 0}}'

from openai import OpenAI
client = OpenAI(base_url="{url}/v1", api_key="none")
print(client.chat.completions.create(model="{NAME}", messages=[
    {{"role": "user", "content": "Leo has a drum. Iris has a coin. What does Iris have?"}}]))

Ctrl-C stops it.""", highlight=False)
        await asyncio.Event().wait()


async def _run(url: str, console: Console) -> list[Exchange]:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60.0) as client:
        return await run_exchanges(client, NAME, console)


async def _ready(url: str) -> None:
    async with asyncio.timeout(READY_TIMEOUT_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(f"{url}/ready") as reply:
                if reply.status == 200:
                    return
            await asyncio.sleep(0.2)


def _compare(pair: list[Exchange], alone: list[Exchange], console: Console) -> bool:
    same = [left.token_ids == right.token_ids for left, right in zip(pair, alone, strict=True)]
    count = sum(len(exchange.token_ids) for exchange in pair)
    if all(same):
        console.print(f"[bold green]All {count} tokens equal those of one node.[/]")
    else:
        console.print(f"[bold red]Tokens differ in requests {[i for i, s in enumerate(same) if not s]}[/]")
    return all(same)


def main(
    stay: Annotated[bool, typer.Option("--keep", help="Stay up and print how to talk to it.")] = False,
    port: Annotated[int, typer.Option(help="Port of the proxy with --keep.")] = 8000,
) -> None:
    """The main job of Tandem on this machine, in a minute."""
    console = Console()
    if stay:
        try:
            asyncio.run(keep(console, port))
        except KeyboardInterrupt:
            console.print("stopped")
        return
    if not asyncio.run(show(console)):
        raise typer.Exit(code=1)


if __name__ == "__main__":
    typer.run(main)
