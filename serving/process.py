"""The life of a server process: start, serve until a signal or a fault, drain, close."""

import asyncio
import logging
import resource
import signal
import sys
from collections.abc import Callable, Coroutine
from typing import Any, Final, NoReturn, Protocol

import structlog
import typer
import uvloop

from engine.errors import EngineDeadError, TandemError
from serving.log_writer import fill_standard_descriptors, take_standard_error

MAX_DESCRIPTORS: Final = 65_536
POLL_S: Final = 0.02
SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


class Server(Protocol):
    """A server as a command line starts and stops it."""

    async def start(self) -> None:
        """Binds, loads, serves."""

    async def wait(self) -> None:
        """Returns when the server was closed. Raises what made it stop by itself."""

    async def drain(self) -> None:
        """Refuses new requests; returns when those under way have ended or their time is over."""

    async def close(self) -> None:
        """Ends what is under way with an error and gives everything back."""


def run_server(make: Callable[[], Server]) -> None:
    """Runs a server until SIGINT or SIGTERM, which drain it; a second one ends it at once.

    A wrong option ends the process with one line and code 2, an engine that died with code 1, so
    that a service manager starts the server again.
    """
    fill_standard_descriptors()
    configure_logging()
    raise_descriptor_limit()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(make()))
    except EngineDeadError as error:
        _fail(error, code=1)
    except TandemError as error:
        _fail(error, code=2)


def configure_logging(level: str = "info") -> None:
    """Structured lines on standard error: key=value on a terminal, JSON elsewhere.

    From here on nothing that is written there raises or waits (`serving.log_writer`).
    """
    take_standard_error()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer()
        if sys.stderr.isatty()
        else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelName(level.upper())),
        # One write for each line: libraries write to standard error too.
        logger_factory=structlog.WriteLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)


def raise_descriptor_limit() -> None:
    """As many descriptors as the system lets this process have: each connection takes one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < MAX_DESCRIPTORS:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MAX_DESCRIPTORS)), hard))


async def _serve(server: Server) -> None:
    # The first signal sets `stop`, which begins the drain; the second sets `hurry`, which ends it.
    # A server that has not started has nothing to drain. Its thread may still load a model, which
    # ends at its next read and the end of the loop waits for: there the second is the kernel's, as
    # a loop that ends hears no signals now and then.
    stop, hurry, started = asyncio.Event(), asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def heard() -> None:
        if not started.is_set():
            for number in SIGNALS:
                loop.remove_signal_handler(number)
                signal.signal(number, signal.SIG_DFL)
        (hurry if stop.is_set() else stop).set()

    async def start() -> None:
        await server.start()
        started.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, heard)
    try:
        await _first(start(), stop.wait())
        if started.is_set():
            await _first(server.wait(), stop.wait())
        if started.is_set() and stop.is_set():
            await _first(server.drain(), server.wait(), hurry.wait())
    finally:
        await server.close()


async def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    """Looks now and then whether `condition` holds; false when it does not within `seconds`."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        if asyncio.get_running_loop().time() >= deadline:
            return False
        await asyncio.sleep(min(POLL_S, seconds))
    return True


async def _first(*coroutines: Coroutine[Any, Any, object]) -> None:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)
    for task in done:
        task.result()


def _fail(error: TandemError, code: int) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code=code)
