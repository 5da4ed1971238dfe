"""A node's KV events: recorded by its cache, published once per step, described to others."""

import structlog
from msgspec import structs

from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.spec import LatentAttentionSpec, LayerSpec, MambaSpec, SlidingWindowSpec
from serving.config import NodeConfig
from serving.kv_events.publisher import EventPublisher, reachable
from serving.kv_events.recorder import AnnouncedGroup, EventRecorder
from serving.kv_events.wire import FULL_ATTENTION, LATENT_ATTENTION, MAMBA, SLIDING_WINDOW
from serving.rpc.messages import KVEventsInfo, KVGroupInfo

log = structlog.get_logger()


class NodeEvents:
    """Owner of a node's recorder and publisher, for one `incarnation` of it.

    `recorder` listens to the cache, `publisher` tells of it. `info`: where to subscribe; None if
    the publisher connects to a collector. `host`: the address that others are told.
    """

    def __init__(self, config: NodeConfig, plan: ArenaPlan, incarnation: str, *, host: str) -> None:
        """Raises ConfigError for an address that cannot be listened on."""
        groups = [announced(group.spec) for group in plan.groups]
        self.recorder = EventRecorder(groups, plan.hash_block_size)
        self.publisher = EventPublisher(config.kv_events_config, incarnation, config.host)
        endpoint, replay = self.publisher.endpoint, self.publisher.replay_endpoint
        replay = None if replay is None else reachable(replay, host)
        self.info: KVEventsInfo | None = None
        if endpoint is None:
            collector = config.kv_events_config.endpoint
            log.info("KV events go to a collector", endpoint=collector, replay_endpoint=replay)
            return
        endpoint = reachable(endpoint, host)
        self.info = KVEventsInfo(
            endpoint=endpoint,
            replay_endpoint=replay,
            topic=config.kv_events_config.topic,
            hash_block_size=plan.hash_block_size,
            hash_seed=config.prefix_hash_seed,
            groups=tuple(KVGroupInfo(*group) for group in groups),
        )
        log.info("KV events are published", endpoint=endpoint, replay_endpoint=replay)

    def identify(self, model_identity: str) -> None:
        """Others are told so once the node serves: the weights are loaded after this was made."""
        if self.info is not None:
            self.info = structs.replace(self.info, model_identity=model_identity)

    def publish(self) -> None:
        """Hands over what the cache has recorded; at the end of each step, on the engine thread."""
        if events := self.recorder.take():
            self.publisher.publish(events)

    def close(self) -> None:
        """Ends the publisher's thread, after the engine's."""
        self.publisher.close()


def announced(spec: LayerSpec) -> AnnouncedGroup:
    """A KV cache group in vLLM's words."""
    if isinstance(spec, MambaSpec):
        return AnnouncedGroup(MAMBA)
    if isinstance(spec, SlidingWindowSpec):
        return AnnouncedGroup(SLIDING_WINDOW, spec.window)
    if isinstance(spec, LatentAttentionSpec):
        return AnnouncedGroup(LATENT_ATTENTION)
    return AnnouncedGroup(FULL_ATTENTION)
