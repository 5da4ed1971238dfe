"""The servers that are measured: those given, or Tandem's own as processes of this machine."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from benchmarks.load.client import Client
from benchmarks.serving.options import ServingOptions, TargetOptions
from benchmarks.support.cluster import FLAGS, NAME, Cluster, cluster
from benchmarks.support.model_folders import DEMO_MODEL
from benchmarks.support.models import WIDE, save_random
from benchmarks.support.processes import servers
from engine.errors import ConfigError

PAIR, ALONE, REFERENCE = "proxy, P and D", "one node", "reference"
UNCACHED = "--no-enable-prefix-caching"
ARENA_BYTES = 1 << 30


class Target(msgspec.Struct, frozen=True):
    """A base URL by its name in the table; `model` may be empty for the first that it serves."""

    name: str
    url: str
    model: str

    def client(self, options: TargetOptions) -> Client:
        """With the key and the headers of all targets."""
        return Client(self.url, self.model, api_key=options.api_key, headers=options.headers())


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
        made = [Target(name, url, NAME) for name, url in ((PAIR, up.proxy), (ALONE, alone))]
        yield made, made[-1]


@contextmanager
def cached_targets_of(
    options: TargetOptions,
) -> Iterator[tuple[list[Target], Target, Cluster | None]]:
    """The same with prefix caching on a random model; the reference is its decode node.

    The cluster is None where the targets were given.
    """
    if options.target:
        yield *_given(options), None
        return
    with TemporaryDirectory() as folder:
        model = save_random(WIDE, Path(folder))
        with cluster(model, "--kv-cache-memory-bytes", str(ARENA_BYTES)) as up:
            yield [Target(PAIR, up.proxy, NAME)], Target(REFERENCE, up.decode[0], NAME), up


def _given(options: TargetOptions) -> tuple[list[Target], Target]:
    made = []
    for number, given in enumerate(options.target, 1):
        head, _, tail = given.partition("=")
        is_named = bool(tail) and not head.startswith(("http://", "https://"))
        name, url = (head, tail) if is_named else (f"target {number}", given)
        made.append(Target(name, _checked(url), options.model))
    if len({target.name for target in made}) < len(made):
        raise ConfigError(f"--target {' '.join(options.target)}: two have the same name")
    if not options.reference:
        return made, made[-1]
    return made, Target(REFERENCE, _checked(options.reference), options.model)


def _checked(url: str) -> str:
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url!r} is no base URL: write http://HOST:PORT, or NAME=http://...")
    return url
