"""A node's connector: its builder, and its parts besides the seam."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.arena import ArenaMemory
from engine.errors import ConfigError
from engine.kv_cache.arena_plan import ArenaPlan
from engine.kv_cache.listener import TierListener
from engine.kv_connector import Connector
from engine.model_configs.identity import ModelIdentity
from serving.config import KVTransferConfig
from serving.metrics import NodeMetrics
from serving.rpc.server import RpcService
from serving.tls import ClientTls


@dataclass(slots=True, frozen=True)
class ConnectorSettings:
    """The settings of a node that its connector needs; `host` is the advertised one.

    `identity` tells the model's; it is known once the engine runs, as its weights are loaded after
    the connector was built. `tiers` hears what a connector keeps; None while nobody asks for KV
    events.
    """

    config: KVTransferConfig
    engine_id: str
    host: str
    cluster_token: str | None
    tls: ClientTls | None
    identity: Callable[[], ModelIdentity]
    vocab_size: int
    max_model_len: int
    prefix_hash_seed: str
    tiers: TierListener | None = None


class NodeConnector(Protocol):
    """A node's connector, and what goes with it."""

    @property
    def connector(self) -> Connector: ...

    def services(self) -> Sequence[RpcService]:
        """gRPC services that peers call."""
        ...

    def advertise(self, port: int) -> None:
        """Tells the connector where its services listen, before the first request."""
        ...

    def is_awaited(self) -> bool:
        """True while a peer may still pull blocks that this node holds for it."""
        ...

    def link_bytes_per_s(self) -> float:
        """The measured speed of one load from a peer, of late; 0: nothing was measured yet."""
        ...

    def close(self) -> None:
        """Gives channels, mappings and registrations back; after the engine has stopped."""
        ...


class ConnectorBuilder(Protocol):
    """Builds the connector of one node."""

    def __call__(
        self,
        settings: ConnectorSettings,
        plan: ArenaPlan,
        arena: ArenaMemory,
        *,
        metrics: NodeMetrics,
        wake: Callable[[], None],
    ) -> NodeConnector:
        """`wake` makes an idle engine step; it may be called from any thread."""
        ...


def check_groups(name: str, connector: Connector, plan: ArenaPlan) -> None:
    """Raises ConfigError if the model has more KV cache groups than the connector carries."""
    if len(plan.groups) > 1 and not connector.scheduler.supports_hma:
        raise ConfigError(
            f"{name} carries one KV cache group, and this model has {len(plan.groups)}; "
            "leave it out, or use PdConnector, OffloadConnector or both under a MultiConnector"
        )


BuilderOf = Callable[[KVTransferConfig], ConnectorBuilder]
"""Raises ConfigError, before anything is loaded, for a configuration that no connector takes."""
