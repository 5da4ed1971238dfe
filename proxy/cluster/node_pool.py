"""All nodes of a proxy: watches their health, refuses those of another model."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import count
from typing import Final

import structlog

from engine.errors import TandemError, UnavailableError
from proxy.backends.connect import WorkerOptions, connect
from proxy.backends.worker import Backend, WorkerUrl
from proxy.cluster.node import Node, NodeKind
from serving.rpc.messages import NodeInfo
from serving.tls import ClientTls

log = structlog.get_logger()

POLL_INTERVAL_S: Final = 1.0
DESCRIBE_TIMEOUT_S: Final = 2.0
NO_MIX: Final = "none takes what another engine hands over, so give each its own proxy"
RESET_TIMEOUT_S: Final = 35.0
"""A little longer than a node waits for the end of its step."""


class NodePool:
    """Owns the nodes and the tasks that watch them, between `start` and `close`.

    Those of the proxy's options are there from the start; `add` and `remove` are for those that
    register. `is_open`: nodes may register, so that one which is lost may be replaced by another.
    """

    def __init__(
        self,
        prefill: Sequence[WorkerUrl],
        decode: Sequence[WorkerUrl],
        *,
        options: WorkerOptions,
        tls: ClientTls | None = None,
        is_open: bool = False,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._model = ""
        self._backend: Backend | None = None
        self._options = options
        self._is_open = is_open
        # Labels are the places among the options: the same after a restart of the proxy.
        urls = [(NodeKind.DECODE, url, f"d{place}") for place, url in enumerate(decode)]
        urls += [(NodeKind.PREFILL, url, f"p{place}") for place, url in enumerate(prefill)]
        self._by_name = {
            url.text: self._make(url, kind, tls, label=label, registers=False)
            for kind, url, label in urls
        }
        self._poll_interval_s = poll_interval_s
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._news = asyncio.Event()
        self._contexts: dict[str, int] = {}

    def start(
        self,
        on_end: Callable[[asyncio.Task[None]], None],
        on_answer: Callable[[str, NodeInfo], None],
        on_gone: Callable[[str], None],
    ) -> None:
        """Starts to watch all nodes, there or not.

        `on_end` gets every watcher that ends, `on_answer` the name of a node that answers and each
        of its descriptions, `on_gone` the name of a node that is removed.
        """
        self._on_end, self._on_answer, self._on_gone = on_end, on_answer, on_gone
        for node in self.nodes:
            self._start_watching(node)

    def add(self, url: WorkerUrl, kind: NodeKind, tls: ClientTls | None) -> Node:
        """A node that has registered; it needs a canary. Watched from now on."""
        letter, taken = kind[0], {node.label for node in self.nodes}
        # Labels are used again: metrics keep a row for each that there ever was.
        label = next(name for place in count() if (name := f"{letter}{place}") not in taken)
        node = self._make(url, kind, tls, label=label, registers=True)
        self._by_name[node.name] = node
        self._start_watching(node)
        return node

    async def remove(self, node: Node) -> None:
        """Ends the node's requests of this proxy, and forgets it."""
        node.leaves(True)
        watcher = self._watchers.pop(node.name)
        watcher.cancel()
        await asyncio.gather(watcher, return_exceptions=True)
        # What others know by its name goes first, so that every name they have is a node's.
        self._on_gone(node.name)
        del self._by_name[node.name]
        self._contexts.pop(node.name, None)
        node.cut_off()
        await node.close()
        self._news.set()

    async def close(self) -> None:
        for task in self._watchers.values():
            task.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        await asyncio.gather(*(node.close() for node in self.nodes))

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes, decode nodes first."""
        return tuple(self._by_name.values())

    @property
    def max_model_len(self) -> int:
        """The longest context of a decode node, in use or lost; 0 before there was one."""
        return max(self._contexts.values(), default=0)

    def node(self, name: str) -> Node:
        return self._by_name[name]

    def label_of(self, name: str) -> str:
        """The name by which everybody may know a node."""
        return self._by_name[name].label

    async def wait_for_news(self, timeout_s: float) -> None:
        """Returns when a node has answered or failed to, and after `timeout_s` at the latest."""
        self._news.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._news.wait()

    def cut_off(self) -> None:
        """Ends every request of this proxy, and the waits for news."""
        for node in self.nodes:
            node.cut_off()
        self._news.set()

    async def reset_prefix_caches(self) -> None:
        """Empties the prefix caches of all nodes that can; all are asked at once.

        Raises UnavailableError that names those that did not, and why.
        """
        nodes = self.nodes
        results = await asyncio.gather(*map(_reset, nodes))
        failed = [why for why in results if why]
        if failed:
            done = len(nodes) - len(failed)
            raise UnavailableError(f"{done} of {len(nodes)} nodes were reset; {'; '.join(failed)}")

    def available(self, kind: NodeKind) -> tuple[Node, ...]:
        return tuple(node for node in self.nodes if node.kind is kind and node.is_available)

    def num_available(self, kind: NodeKind) -> int:
        return len(self.available(kind))

    def may_get(self, kind: NodeKind) -> bool:
        """True if a node that is out of use may come back, or one that nobody knows may come."""
        return self._is_open or any(
            node.kind is kind and not node.is_available for node in self.nodes
        )

    def num_resting(self, kind: NodeKind) -> int:
        return sum(node.rests for node in self.available(kind))

    def _make(
        self, url: WorkerUrl, kind: NodeKind, tls: ClientTls | None, *, label: str, registers: bool
    ) -> Node:
        worker = connect(url, self._options, tls)
        # Whoever is written into the options of this project's own is trusted to work.
        needs_canary = registers or url.is_foreign
        return Node(url.text, kind, worker, label=label, needs_canary=needs_canary)

    def _start_watching(self, node: Node) -> None:
        watcher = asyncio.create_task(self._watch(node))
        watcher.add_done_callback(self._on_end)
        self._watchers[node.name] = watcher

    async def _watch(self, node: Node) -> None:
        while True:
            info = await node.refresh(DESCRIBE_TIMEOUT_S)
            # `refresh` has set the problem of a node that is away; here one of another model.
            if info is not None:
                node.set_problem(self._objection(node, info))
                if node.answers:
                    self._on_answer(node.name, info)
            if node.is_available and node.kind is NodeKind.DECODE:
                self._contexts[node.name] = node.info.max_model_len
            self._news.set()
            await asyncio.sleep(self._poll_interval_s)

    def _objection(self, node: Node, info: NodeInfo) -> str | None:
        if not info.model_names or info.vocab_size < 1:
            return "names no model"
        # The first backend wins, as the first model does: no engine reads another's hand-over.
        backend = node.worker.backend
        self._backend = self._backend or backend
        if backend is not self._backend:
            return f"is a {backend} worker where this cluster's are {self._backend}: {NO_MIX}"
        if node.worker.needs_prefill and info.kind != node.kind:
            # Whoever has another's name now, or was switched, would keep a request waiting.
            return f"plays the part {info.kind!r}, and is named as a {node.kind} node"
        model = f"model {info.model_names[0]!r} with {info.vocab_size} tokens"
        # The first answer wins for the life of the proxy, also over nodes that are lost since.
        self._model = self._model or model
        if model == self._model:
            return None
        problem = f"serves {model} where this cluster serves {self._model}"
        if problem != node.problem:
            log.error("node is refused", node=node.name, problem=problem)
        return problem


async def _reset(node: Node) -> str:
    """Why a node's prefix cache was not reset; empty if it was."""
    try:
        await node.worker.reset_prefix_cache(RESET_TIMEOUT_S)
    except TandemError as error:
        return f"{node.name}: {error}"
    return ""
