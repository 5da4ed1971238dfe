"""The nodes' KV events on their way into the index: follows what each node says of itself.

A node tells where it publishes, so nobody configures it here. A node that has restarted is another
one: what it held is forgotten at once, before its own events say so.
"""

from collections.abc import Callable

import msgspec
import structlog

from engine.errors import ConfigError
from proxy.routing.engine_hashes import EngineHashes
from proxy.routing.prefix_index import PrefixIndex
from serving.kv_events.follower import EventSource, SourceStats
from serving.kv_events.subscriber import EventSubscriber
from serving.rpc.messages import KVEventsInfo, NodeInfo

log = structlog.get_logger()


class EventSources:
    """Owns the one subscriber of a proxy; belongs to the event loop.

    `on_loss` hears of nodes that have lost what they held.
    """

    def __init__(self, index: PrefixIndex, on_loss: Callable[[str], None]) -> None:
        self._index = index
        self._on_loss = on_loss
        self._subscriber = EventSubscriber(index)
        self._engines: dict[str, EngineHashes] = {}  # by node, those of other projects
        self._told: dict[str, tuple[str, KVEventsInfo]] = {}  # by node, what it said last
        self._followed: set[str] = set()

    def follow(self, name: str, info: NodeInfo) -> None:
        """Node `name` has described itself."""
        events = info.kv_events
        told = None if events is None else (info.engine_id, events)
        if told == self._told.get(name):
            return
        self.forget(name)
        if events is None:
            return
        self._told[name] = info.engine_id, events
        # The index knows the node before its first event comes.
        self._index.set_node(name, events)
        is_foreign = events.publisher != "tandem"
        engine = EngineHashes(self._index, events) if is_foreign else None
        source = EventSource(events.endpoint, events.replay_endpoint, events.topic, is_foreign)
        try:
            self._subscriber.add(name, source, engine)
        except ConfigError as error:
            # What a node says of itself must not end the proxy: it is routed to by its load.
            log.error("node's KV events cannot be followed", node=name, problem=str(error))
            return
        self._followed.add(name)
        if engine is not None:
            self._engines[name] = engine
        log.info("node's KV events are followed", node=name, endpoint=events.endpoint)

    def forget(self, name: str) -> None:
        """The node is gone, or has become another one."""
        if self._told.pop(name, None) is None:
            return
        self._followed.discard(name)
        self._subscriber.remove(name)
        # After `remove`, so that nothing of the old incarnation comes later.
        self._engines.pop(name, None)
        self._index.remove_node(name)
        self._on_loss(name)

    def stats(self) -> dict[str, SourceStats]:
        """By node what was received since it was followed."""
        stats = {name: self._subscriber.stats(name) for name in self._followed}
        for name, engine in self._engines.items():
            if name in stats:
                unplaced = engine.num_unplaced
                stats[name] = msgspec.structs.replace(stats[name], num_unplaced=unplaced)
        return stats

    def close(self) -> None:
        """Ends the subscriber's thread."""
        self._followed.clear()
        self._subscriber.close()
