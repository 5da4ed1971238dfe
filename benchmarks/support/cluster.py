"""A cluster on this machine for a benchmark: nodes and a proxy as processes, until a block ends."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from benchmarks.support.processes import Server, processes

NAME = "bench"
METRICS_S = 10.0
FLAGS = (
    "--port",
    "0",
    "--served-model-name",
    NAME,
    "--dtype",
    "float32",
    "--enable-prompt-tokens-details",
)


@dataclass(slots=True, frozen=True)
class Cluster:
    """Base URLs, and the processes: prefill nodes, decode nodes, the proxy.

    Without a prefill node every decode node prefills its own prompts.
    """

    proxy: str
    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    servers: tuple[Server, ...]

    def counted(self) -> dict[str, float]:
        """The counters of all nodes, by metric and role: `vllm:prefix_cache_hits P`."""
        found: dict[str, float] = {}
        for role, urls in (("P", self.prefill), ("D", self.decode)):
            for url in urls:
                for name, value in _counters(url):
                    found[f"{name} {role}"] = found.get(f"{name} {role}", 0.0) + value
        return found


@contextmanager
def cluster(
    model: Path, *flags: str, prefill: int = 1, decode: int = 1, of_proxy: Sequence[str] = ()
) -> Iterator[Cluster]:
    """All nodes start at once with equal `flags`, then the proxy with `of_proxy`."""
    kinds = ["prefill_node"] * prefill + ["decode_node"] * decode
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        commands = [(kind, str(model), *FLAGS, *flags) for kind in kinds]
        nodes = stack.enter_context(processes(folder, *commands))
        urls = tuple(node.url() for node in nodes)
        named = [
            word
            for kind, url in zip(kinds, urls, strict=True)
            for word in (f"--{kind.removesuffix('_node')}", url)
        ]
        front = ("proxy", *named, "--port", "0", "--enable-prompt-tokens-details", *of_proxy)
        (proxy,) = stack.enter_context(processes(folder, front))
        yield Cluster(proxy.url(), urls[:prefill], urls[prefill:], (*nodes, proxy))


def _counters(url: str) -> Iterator[tuple[str, float]]:
    """Counters, and the sums of histograms."""
    with urlopen(f"{url}/metrics", timeout=METRICS_S) as reply:
        text = reply.read().decode()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith(("_total", "_sum")):
                yield sample.name.removesuffix("_total"), sample.value
