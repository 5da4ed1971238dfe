"""The proxies that stand in front of one set of vLLM workers, each as a process of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from benchmarks.support.processes import servers
from benchmarks.support.toy_proxy import ToyProxy
from benchmarks.support.vllm_peer import Setup, Workers

TANDEM, TOY, ALONE = "Tandem's proxy", "vLLM's toy proxy", "one node alone"


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
    proxy = ToyProxy(stack.setup.program.with_name("python"), stack.toy_proxy)
    prefill, decode = ([one.url for one in those] for those in (up.prefill, up.decode))
    with proxy.serving(prefill, decode, stack.setup.logs / "toy-proxy.log") as (url, _):
        yield Front(TOY, url)
