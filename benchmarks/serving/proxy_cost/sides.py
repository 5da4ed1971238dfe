"""The servers that `proxy_cost` measures beside each other, and what they forward to."""

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

import msgspec

from benchmarks.serving.proxy_cost.load import Target
from benchmarks.serving.proxy_cost.upstream import FILES, VOCAB_SIZE
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.support.processes import processes
from benchmarks.support.toy_proxy import ToyProxy

PROXY, TOY, PASS_THROUGH = "proxy", "toy proxy", "pass-through"
PACKAGE = "benchmarks.serving.proxy_cost"
ANSWER_S = 10.0


@dataclass(slots=True, frozen=True)
class Sides:
    """All targets by name, the proxy first. `decode`: address of the D that speaks gRPC."""

    targets: dict[str, Target]
    decode: str | None = None


@contextmanager
def before_nodes(folder: Path) -> Iterator[Sides]:
    """The proxy in front of two nodes of this project, and the pass-through of one request."""
    with processes(folder, (f"{PACKAGE}.upstream",)) as (upstream,):
        with urlopen(f"{upstream.url()}/nodes", timeout=ANSWER_S) as reply:
            nodes = msgspec.json.decode(reply.read(), type=dict[str, str])
        roles = [word for kind, url in nodes.items() for word in (f"--{kind}", url)]
        proxy = ("proxy", *roles, "--port", "0")
        with _started(folder, proxy, (f"{PACKAGE}.pass_through", upstream.url())) as targets:
            yield Sides(targets, nodes["decode"].removeprefix("grpc://"))


@contextmanager
def before_vllm_workers(folder: Path, toy: ToyProxy | None) -> Iterator[Sides]:
    """The proxy in front of two HTTP workers, the toy proxy, and the pass-through of two requests.

    Raises RuntimeError where one of them had D compute a prompt.
    """
    worker = (f"{PACKAGE}.vllm_worker",)
    with ExitStack() as stack:
        workers = stack.enter_context(processes(folder, worker, worker))
        prefill, decode = (it.url() for it in workers)
        model = str(_model(folder / "model"))
        named = ("--prefill", prefill, "--decode", decode, "--tokenizer", model)
        proxy = ("proxy", "--backend", "vllm", *named, "--port", "0")
        bare = (f"{PACKAGE}.pass_through", decode, prefill)
        targets = stack.enter_context(_started(folder, proxy, bare))
        if toy is not None:
            serving = toy.serving([prefill], [decode], folder / "toy-proxy.log")
            targets = {PROXY: targets[PROXY], TOY: Target(*stack.enter_context(serving)), **targets}
        yield Sides(targets)
        if computed := _num_computed(decode):
            raise RuntimeError(f"D computed {computed} prompt tokens: a proxy left P out")


def _num_computed(worker: str) -> int:
    """Prompt tokens that a worker has not pulled."""
    with urlopen(f"{worker}/metrics", timeout=ANSWER_S) as reply:
        return int(re.findall(rb'source="local_compute"} (\d+)', reply.read())[0])


@contextmanager
def _started(folder: Path, *commands: tuple[str, ...]) -> Iterator[dict[str, Target]]:
    """Of the proxy and of the pass-through."""
    with processes(folder, *commands) as servers:
        targets = [Target(it.url(), it.process.pid) for it in servers]
        yield dict(zip((PROXY, PASS_THROUGH), targets, strict=True))


def _model(folder: Path) -> Path:
    """The demo's tokenizer, and more token ids than it knows: most prompts have large ones."""
    folder.mkdir()
    for name in FILES:
        shutil.copy(DEMO_MODEL / name, folder)
    (folder / "config.json").write_bytes(msgspec.json.encode({"vocab_size": VOCAB_SIZE}))
    return folder
