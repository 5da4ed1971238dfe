"""A node's connector: how it is built, and its parts besides the seam."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TypeAlias

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
class NodeParts:
    """The parts and settings of a node that its connector needs; `host` is the advertised one.

    `identity` tells the model's; it is known once the engine runs, as its weights are loaded after
    the connector was built. `wake` makes an idle engine step, from any thread. `tiers` hears what a
    connector keeps; None while nobody asks for KV events. On `resources` a connector puts what it
    opens: the node gives it back, the last first, after the engine has stopped.
    """

    plan: ArenaPlan
    arena: ArenaMemory
    metrics: NodeMetrics
    wake: Callable[[], None]
    resources: AsyncExitStack
    engine_id: str
    host: str
    cluster_token: str | None
    tls: ClientTls | None
    identity: Callable[[], ModelIdentity]
    vocab_size: int
    max_model_len: int
    prefix_hash_seed: str
    tiers: TierListener | None = None


class NodeConnector(ABC):
    """A node's connector, and what goes with it. Only one with peers overrides the rest."""

    connector: Connector

    @classmethod
    @abstractmethod
    def builder(cls, config: KVTransferConfig, builder_of: "BuilderOf", /) -> "Build":
        """Decodes its options; the call that builds it once the node has its parts.

        `builder_of`: for connectors that have others. Raises ConfigError for wrong options; the
        call raises it for a model or a machine that they do not suit.
        """

    def services(self) -> Sequence[RpcService]:
        """gRPC services that peers call."""
        return ()

    def advertise(self, port: int) -> None:
        """Tells the connector where its services listen, before the first request."""
        return None

    def is_awaited(self) -> bool:
        """True while a peer may still pull blocks that this node holds for it."""
        return False

    def link_bytes_per_s(self) -> float:
        """The measured speed of one load from a peer, of late; 0: nothing was measured yet."""
        return 0.0


Build: TypeAlias = Callable[[NodeParts], NodeConnector]
BuilderOf: TypeAlias = Callable[[KVTransferConfig], Build]
"""Raises ConfigError, before anything is loaded, for a configuration that no connector takes."""


def check_groups(name: str, connector: Connector, plan: ArenaPlan) -> None:
    """Raises ConfigError if the model has more KV cache groups than the connector carries."""
    if len(plan.groups) > 1 and not connector.scheduler.supports_hma:
        raise ConfigError(
            f"{name} carries one KV cache group, and this model has {len(plan.groups)}; "
            "leave it out, or use PdConnector, OffloadConnector or both under a MultiConnector"
        )
