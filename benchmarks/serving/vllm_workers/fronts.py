"""The proxies that stand in front of one set of vLLM workers, each as a process of its own."""

import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import msgspec

from benchmarks.support.processes import ctrl_c_later, end_with_parent, servers
from benchmarks.support.vllm_peer import LOOPBACK, Setup, VllmError, Worker, Workers, free_ports

TANDEM, TOY, ALONE = "Tandem's proxy", "vLLM's toy proxy", "one node alone"
START_S = 60.0
STOP_S = 10.0
POLL_S = 0.2
HTTP_S = 5.0


class Front(msgspec.Struct, frozen=True):
    """A server to ask, by its name in the tables."""

    name: str
    url: str


class Stack(msgspec.Struct, frozen=True):
    """The workers' setup, and the file of vLLM's toy proxy."""

    setup: Setup
    toy_proxy: Path


@contextmanager
def tandem(stack: Stack, up: Workers, *words: str, name: str = TANDEM) -> Iterator[Front]:
    """Tandem's proxy in front of `up`, with more `words`; raises RuntimeError with its log."""
    named = [
        word
        for role, those in (("prefill", up.prefill), ("decode", up.decode))
        for one in those
        for word in (f"--{role}", f"vllm+{one.url}")
    ]
    tokenizer = ("--tokenizer", str(stack.setup.model), "--port", "0")
    with servers(stack.setup.logs, ("proxy", *named, *tokenizer, *words)) as (url,):
        yield Front(name, url)


@contextmanager
def toy(stack: Stack, up: Workers) -> Iterator[Front]:
    """vLLM's toy proxy, run by the Python beside `vllm`; raises VllmError if it does not serve."""
    (port,) = free_ports(1)
    words = [
        str(stack.setup.program.with_name("python")),
        str(stack.toy_proxy),
        "--port",
        str(port),
    ]
    words += _ports("prefiller", up.prefill) + _ports("decoder", up.decode)
    log = stack.setup.logs / "toy-proxy.log"
    with log.open("wb") as file, ctrl_c_later():
        process = subprocess.Popen(
            words,
            stdout=file,
            stderr=file,
            start_new_session=True,
            preexec_fn=end_with_parent if sys.platform == "linux" else None,
        )
    try:
        url = f"http://{LOOPBACK}:{port}"
        _wait(f"{url}/healthcheck", process, log)
        yield Front(TOY, url)
    finally:
        process.terminate()
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ports(role: str, those: Sequence[Worker]) -> list[str]:
    hosts = [LOOPBACK] * len(those)
    ports = [str(urlsplit(one.url).port) for one in those]
    return [f"--{role}-hosts", *hosts, f"--{role}-ports", *ports]


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        try:
            with urlopen(url, timeout=HTTP_S):
                return
        except (OSError, HTTPException) as error:
            if process.poll() is not None or time.monotonic() > deadline:
                said = log.read_text(errors="replace")
                raise VllmError(f"{TOY} does not serve:\n{said}") from error
            time.sleep(POLL_S)
