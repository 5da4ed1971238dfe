"""The nodes' KV events on their way into the index: follows what each node says of itself.

A node tells where it publishes, so nobody configures it here. A node that has restarted is another
one: what it held is forgotten at once, before its own events say so.
"""

from collections.abc import Callable, Sequence

import msgspec
import structlog

from engine.errors import ConfigError
from proxy.routing.engine_hashes import EngineHashes
from proxy.routing.prefix_index import PrefixIndex
from serving.kv_events.follower import EventSink, EventSource, SourceStats
from serving.kv_events.subscriber import EventSubscriber
from serving.kv_events.wire import Event
from serving.rpc.messages import KVEventsInfo, NodeInfo

log = structlog.get_logger()


class _Sinks:
    """The subscriber's sink: the index, or for engines of other projects what translates for it.

    `engines` changes only for names that are not followed at that moment.
    """

    def __init__(self, index: PrefixIndex) -> None:
        self.engines: dict[str, EngineHashes] = {}
        self._index = index

    def apply(self, name: str, events: Sequence[Event]) -> None:
        self._of(name).apply(name, events)

    def clear(self, name: str) -> None:
        self._of(name).clear(name)

    def doubt(self, name: str, now: float) -> None:
        self._of(name).doubt(name, now)

    def tick(self, name: str, now: float) -> None:
        self._of(name).tick(name, now)

    def _of(self, name: str) -> EventSink:
        return self.engines.get(name, self._index)


class EventSources:
    """Owns the one subscriber of a proxy; belongs to the event loop.

    `on_loss` hears of nodes that have lost what they held.
    """

    def __init__(self, index: PrefixIndex, on_loss: Callable[[str], None]) -> None:
        self._index = index
        self._on_loss = on_loss
        self._sinks = _Sinks(index)
        self._subscriber = EventSubscriber(self._sinks)
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
        if is_foreign:
            self._sinks.engines[name] = EngineHashes(self._index, events)
        source = EventSource(events.endpoint, events.replay_endpoint, events.topic, is_foreign)
        try:
            self._subscriber.add(name, source)
        except ConfigError as error:
            # What a node says of itself must not end the proxy: it is routed to by its load.
            log.error("node's KV events cannot be followed", node=name, problem=str(error))
            return
        self._followed.add(name)
        log.info("node's KV events are followed", node=name, endpoint=events.endpoint)

    def forget(self, name: str) -> None:
        """The node is gone, or has become another one."""
        if self._told.pop(name, None) is None:
            return
        self._followed.discard(name)
        self._subscriber.remove(name)
        # After `remove`, so that nothing of the old incarnation comes later.
        self._sinks.engines.pop(name, None)
        self._index.remove_node(name)
        self._on_loss(name)

    def stats(self) -> dict[str, SourceStats]:
        """By node what was received since it was followed."""
        stats = {name: self._subscriber.stats(name) for name in self._followed}
        for name, engine in self._sinks.engines.items():
            if name in stats:
                unplaced = engine.num_unplaced
                stats[name] = msgspec.structs.replace(stats[name], num_unplaced=unplaced)
        return stats

    def close(self) -> None:
        """Ends the subscriber's thread."""
        self._followed.clear()
        self._subscriber.close()
