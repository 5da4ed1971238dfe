"""All nodes of the proxy's options: watches their health, refuses those of another model."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

import structlog

from engine.errors import TandemError, UnavailableError
from proxy.cluster.node import Node, NodeKind
from serving.rpc.messages import NodeInfo
from serving.rpc.node_http import NodeUrl
from serving.tls import ClientTls

log = structlog.get_logger()

POLL_INTERVAL_S: Final = 1.0
DESCRIBE_TIMEOUT_S: Final = 2.0
RESET_TIMEOUT_S: Final = 35.0
"""A little longer than a node waits for the end of its step."""


class NodePool:
    """Owns the nodes and the tasks that watch them, between `start` and `close`."""

    def __init__(
        self,
        prefill: Sequence[NodeUrl],
        decode: Sequence[NodeUrl],
        *,
        token: str | None,
        tls: ClientTls | None = None,
        poll_interval_s: float = POLL_INTERVAL_S,
    ) -> None:
        self._model = ""
        # Labels are the places among the options: the same after a restart of the proxy.
        urls = [(NodeKind.DECODE, url, f"d{place}") for place, url in enumerate(decode)]
        urls += [(NodeKind.PREFILL, url, f"p{place}") for place, url in enumerate(prefill)]
        self._by_name = {
            url.text: Node(url, kind, label=label, token=token, tls=tls)
            for kind, url, label in urls
        }
        self._poll_interval_s = poll_interval_s
        self._watchers: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._contexts: dict[str, int] = {}

    def start(
        self,
        on_end: Callable[[asyncio.Task[None]], None],
        on_answer: Callable[[str, NodeInfo], None],
    ) -> None:
        """Starts to watch all nodes, there or not.

        `on_end` gets every watcher that ends, `on_answer` a usable node's name and each of its
        descriptions.
        """
        self._watchers = [asyncio.create_task(self._watch(node, on_answer)) for node in self.nodes]
        for watcher in self._watchers:
            watcher.add_done_callback(on_end)

    async def close(self) -> None:
        for task in self._watchers:
            task.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
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

    def num_away(self, kind: NodeKind) -> int:
        """Nodes out of use, which may come back."""
        return sum(node.kind is kind and not node.is_available for node in self.nodes)

    def num_resting(self, kind: NodeKind) -> int:
        return sum(node.rests for node in self.available(kind))

    async def _watch(self, node: Node, on_answer: Callable[[str, NodeInfo], None]) -> None:
        while True:
            info = await node.refresh(DESCRIBE_TIMEOUT_S)
            # `refresh` has set the problem of a node that is away; here one of another model.
            if info is not None:
                node.set_problem(self._objection(node, info))
                if node.is_available:
                    on_answer(node.name, info)
            if node.is_available and node.kind is NodeKind.DECODE:
                self._contexts[node.name] = node.info.max_model_len
            self._news.set()
            await asyncio.sleep(self._poll_interval_s)

    def _objection(self, node: Node, info: NodeInfo) -> str | None:
        if not info.model_names or info.vocab_size < 1:
            return "names no model"
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
        await node.client.reset_prefix_cache(RESET_TIMEOUT_S)
    except TandemError as error:
        return f"{node.name}: {error}"
    return ""
