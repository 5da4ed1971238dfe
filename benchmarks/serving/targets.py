"""The servers that are measured: those given, or Tandem's own as processes of this machine."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.serving.options import ServingOptions
from benchmarks.support.cluster import FLAGS, NAME, cluster
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.support.processes import servers
from engine.errors import ConfigError

PAIR, ALONE, REFERENCE = "proxy, P and D", "one node", "reference"
UNCACHED = "--no-enable-prefix-caching"


class Target(msgspec.Struct, frozen=True):
    """A base URL by its name in the table; `model` may be empty for the first that it serves."""

    name: str
    url: str
    model: str
    cores: int


@contextmanager
def targets_of(options: ServingOptions) -> Iterator[tuple[list[Target], Target]]:
    """All targets, and the one that gives the reference; own servers end with the block."""
    if options.target:
        yield _given(options)
        return
    with TemporaryDirectory() as folder, ExitStack() as stack:
        model = Path(options.model) if options.model else DEMO_MODEL
        up = stack.enter_context(cluster(model, UNCACHED))
        node = ("decode_node", str(model), *FLAGS, UNCACHED)
        (alone,) = stack.enter_context(servers(Path(folder), node))
        made = [
            Target(name, url, NAME, _cores(options))
            for name, url in ((PAIR, up.proxy), (ALONE, alone))
        ]
        yield made, made[-1]


def _given(options: ServingOptions) -> tuple[list[Target], Target]:
    made = []
    for number, given in enumerate(options.target, 1):
        name, url = given.split("=", 1) if "=" in given else (f"target {number}", given)
        made.append(Target(name, _checked(url), options.model, _cores(options)))
    if len({target.name for target in made}) < len(made):
        raise ConfigError(f"--target {' '.join(options.target)}: two have the same name")
    if not options.reference:
        return made, made[-1]
    return made, Target(REFERENCE, _checked(options.reference), options.model, _cores(options))


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no base URL: write http://HOST:PORT, or NAME=http://...")
    return url


def _cores(options: ServingOptions) -> int:
    return options.cores or os.cpu_count() or 1
