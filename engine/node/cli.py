"""The command line of a node, the same for every kind of node; names are vLLM's."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn, Protocol

import typer

from engine.config import NodeConfig
from engine.errors import TandemError
from engine.logs import configure_logging
from engine.node.settings import node_config


class Server(Protocol):
    """What a command line starts and stops."""

    async def start(self) -> None:
        """Binds, loads, serves."""

    async def wait(self) -> None:
        """Returns when the server stopped by itself."""

    async def close(self) -> None:
        """Gives everything back."""


def node_app(kind: str, port: int, make_server: Callable[[NodeConfig], Server]) -> typer.Typer:
    """A typer app with one command that runs a `kind` node, by default on HTTP port `port`."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

    @app.command(help=f"Run a Tandem {kind} node: an OpenAI-compatible server that can also hand "
                 "prefills over to, or take them from, other nodes.")  # fmt: skip
    def run(
        model: Annotated[
            str | None, typer.Argument(help="Hugging Face folder, or hub name.", show_default=False)
        ] = None,
        host: Annotated[str | None, typer.Option(help="Address to listen on. [127.0.0.1]")] = None,
        port_: Annotated[
            int | None, typer.Option("--port", help=f"HTTP port, 0 for any. [{port}]")
        ] = None,
        grpc_port: Annotated[
            int | None, typer.Option(help="Port of control and token streams, 0 for any. [0]")
        ] = None,
        served_model_name: Annotated[
            list[str] | None, typer.Option(help="Model name(s) in the API. [the model]")
        ] = None,
        dtype: Annotated[
            str | None, typer.Option(help="auto, float32, bfloat16 or float16. [auto]")
        ] = None,
        max_model_len: Annotated[
            int | None, typer.Option(help="Context in tokens. [what model and memory allow]")
        ] = None,
        max_num_seqs: Annotated[int | None, typer.Option(help="Requests in a batch. [64]")] = None,
        max_num_batched_tokens: Annotated[
            int | None, typer.Option(help="Tokens computed in one step. [2048]")
        ] = None,
        block_size: Annotated[
            int | None, typer.Option(help="Tokens in an attention block. [16]")
        ] = None,
        kv_cache_memory_bytes: Annotated[
            int | None, typer.Option(help="Size of the KV arena. [536870912]")
        ] = None,
        enable_prefix_caching: Annotated[
            bool | None,
            typer.Option("--enable-prefix-caching/--no-enable-prefix-caching", help="[no]"),
        ] = None,
        kv_transfer_config: Annotated[
            str | None,
            typer.Option(
                help='JSON: kv_connector ("PdConnector"), kv_role (kv_both, kv_producer, kv_consumer), '
                "kv_load_failure_policy (recompute, fail), kv_connector_extra_config "
                "(transport: auto, shm, nixl; kv_lease_duration; ...)."
            ),
        ] = None,
        kv_events_config: Annotated[
            str | None, typer.Option(help="JSON: enable_kv_cache_events, endpoint, topic, ...")
        ] = None,
        api_key: Annotated[
            str | None, typer.Option(envvar="VLLM_API_KEY", help="Key of the HTTP API.")
        ] = None,
        cluster_token: Annotated[
            str | None,
            typer.Option(envvar="TANDEM_CLUSTER_TOKEN", help="Shared secret of all nodes."),
        ] = None,
        num_threads: Annotated[
            int | None, typer.Option(help="torch threads; more than cores is far slower. [1]")
        ] = None,
        config: Annotated[
            Path | None, typer.Option(help="YAML whose keys are these flags; flags win.")
        ] = None,
    ) -> None:
        flags: dict[str, Any] = {
            "model": model,
            "host": host,
            "port": port_,
            "grpc_port": grpc_port,
            "served_model_name": served_model_name or None,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens,
            "block_size": block_size,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "enable_prefix_caching": enable_prefix_caching,
            "kv_transfer_config": kv_transfer_config,
            "kv_events_config": kv_events_config,
            "api_key": api_key,
            "cluster_token": cluster_token,
            "num_threads": num_threads,
        }
        run_server(lambda: make_server(node_config(flags, config, {"port": port})))

    return app


def run_server(make: Callable[[], Server]) -> None:
    """Runs a server until SIGINT or SIGTERM; a wrong option ends the process with one clear line."""
    configure_logging()
    try:
        asyncio.run(_serve(make()))
    except TandemError as error:
        _fail(error)


async def _serve(server: Server) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        await server.start()
        await _first(server.wait(), stop.wait())
    finally:
        await server.close()


async def _first(*coroutines: Any) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def _fail(error: TandemError) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code=2)
